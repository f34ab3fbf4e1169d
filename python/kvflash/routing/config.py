"""Settings of a router."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvflash._core import RouterCore
from kvflash.errors import ConfigError, InvalidArgumentError

__all__ = ["KvRouterConfig", "override_options"]

logger = logging.getLogger(__name__)

# What a request may want otherwise, and the core's word for it.
_OVERRIDES = {
    "overlap_score_weight": "overlap_score_weight",
    "overlap_score_credit": "overlap_score_credit",
    "prefill_load_scale": "prefill_load_scale",
    "router_temperature": "router_temperature",
    "assume_kv_reuse": "assume_kv_reuse",
    "router_assume_kv_reuse": "assume_kv_reuse",
}
_NO_BROKER = ("durable_kv_events", "router_reset_states")


@dataclass(frozen=True, kw_only=True)
class KvRouterConfig:
    """How a :class:`KvPushRouter` decides.

    Attributes:
        overlap_score_weight: What a block to prefill costs, in blocks held by running requests; 0:
            caches do not count, and no events are listened to.
        overlap_score_credit: What a cached block saves, in blocks to prefill; 0: caches do not
            count, and no events are listened to.
        overlap_score_credit_decay: How fast that credit fades where more prefill is queued than at
            the idlest worker.
        prefill_load_scale: What the rest to prefill counts, credit taken off.
        active_request_weight: What each running request costs, in blocks.
        router_temperature: 0 takes the cheapest worker; more spreads the choice.
        use_kv_events: Listen to the workers' KV events. Without, a worker is believed to hold what
            was sent to it, for router_ttl_secs.
        router_track_active_blocks: Count the blocks of running requests.
        router_track_output_blocks: Count generated blocks too.
        router_track_prefill_tokens: Count prompt tokens until the first token came.
        router_assume_kv_reuse: Requests that share a block hold it once.
        router_ttl_secs: Seconds; without events only.
        router_max_tree_size: Blocks that are believed so, counted per worker.
        router_prune_target_ratio: Share of them that is left when there were more.
        router_predicted_ttl_secs: With events: seconds for which what was just sent to a worker
            counts as cached there until its events tell; None or 0 counts nothing.
        active_decode_blocks_threshold: Share of a worker's blocks above which it is busy.
        active_prefill_tokens_threshold: Prompt tokens to be prefilled above which it is.
        active_prefill_tokens_threshold_frac: The same in batches of the worker.
        active_request_expiry_secs: Seconds without activity after which load is freed.
        max_requests: Most requests at once.
        decision_journal_bytes: Memory for past decisions, for :meth:`KvPushRouter.why`.
        router_snapshot_threshold: Accepted; there is no stream to be cut.
        router_event_threads: Accepted; one thread receives, queries wait for nobody.
        durable_kv_events: Accepted, with a warning: events come from the workers directly.
        router_replica_sync: Count the requests of other routers of the same workers, and tell
            them of one's own: over ZMQ, or over NATS where KVFLASH_EVENT_PLANE says so.
        router_reset_states: Accepted, with a warning: a router begins empty.

    Raises:
        ConfigError: A setting is out of range, or contradicts another; names it.
    """

    overlap_score_weight: float = 1.0
    overlap_score_credit: float = 1.0
    overlap_score_credit_decay: float = 0.0
    prefill_load_scale: float = 1.0
    active_request_weight: float = 0.0
    router_temperature: float = 0.0
    use_kv_events: bool = True
    router_track_active_blocks: bool = True
    router_track_output_blocks: bool = False
    router_track_prefill_tokens: bool = True
    router_assume_kv_reuse: bool = True
    router_ttl_secs: float = 120.0
    router_max_tree_size: int = 1_048_576
    router_prune_target_ratio: float = 0.8
    router_predicted_ttl_secs: float | None = 5.0
    active_decode_blocks_threshold: float | None = None
    active_prefill_tokens_threshold: int | None = None
    active_prefill_tokens_threshold_frac: float | None = None
    active_request_expiry_secs: float = 300.0
    max_requests: int = 65_536
    decision_journal_bytes: int = 16 * 1024 * 1024
    router_snapshot_threshold: int | None = 1_000_000
    router_event_threads: int = 4
    durable_kv_events: bool = False
    router_replica_sync: bool = False
    router_reset_states: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "bool" and not isinstance(value, bool):
                raise ConfigError(f"{field.name} must be True or False, got {value!r}")
        for name in (
            "overlap_score_weight",
            "overlap_score_credit",
            "overlap_score_credit_decay",
            "prefill_load_scale",
            "active_request_weight",
            "router_temperature",
            "router_ttl_secs",
            "router_predicted_ttl_secs",
            "active_prefill_tokens_threshold_frac",
        ):
            _in_range(name, getattr(self, name), 0, math.inf)
        for name in ("router_prune_target_ratio", "active_decode_blocks_threshold"):
            _in_range(name, getattr(self, name), 0, 1)
        _in_range("active_request_expiry_secs", self.active_request_expiry_secs, 0.001, math.inf)
        for name, low in (
            ("router_max_tree_size", 1),
            ("max_requests", 1),
            ("decision_journal_bytes", 0),
            ("active_prefill_tokens_threshold", 0),
            ("router_snapshot_threshold", 1),
            ("router_event_threads", 1),
        ):
            value = getattr(self, name)
            _in_range(name, value, low, 2**62)
            if value is not None and not isinstance(value, int):
                raise ConfigError(f"{name} must be a whole number, got {value!r}")
        if self.durable_kv_events and not self.use_kv_events:
            raise ConfigError("durable_kv_events requires use_kv_events")
        if self.router_track_output_blocks and not self.router_track_active_blocks:
            raise ConfigError("router_track_output_blocks requires router_track_active_blocks")
        for name in _NO_BROKER:
            if getattr(self, name):
                logger.warning("KvRouterConfig: %s has no effect here", name)

    def make_core(self, block_size: int) -> RouterCore:
        """The core that decides so, for blocks of ``block_size`` tokens.

        Raises:
            InvalidArgumentError: The block size is 0 or too large.
        """
        return RouterCore(
            block_size=block_size,
            overlap_score_weight=self.overlap_score_weight,
            overlap_score_credit=self.overlap_score_credit,
            overlap_score_credit_decay=self.overlap_score_credit_decay,
            prefill_load_scale=self.prefill_load_scale,
            active_request_weight=self.active_request_weight,
            temperature=self.router_temperature,
            use_kv_events=self.use_kv_events,
            track_active_blocks=self.router_track_active_blocks,
            assume_kv_reuse=self.router_assume_kv_reuse,
            track_prefill_tokens=self.router_track_prefill_tokens,
            active_request_expiry_s=self.active_request_expiry_secs,
            predicted_ttl_s=self.router_predicted_ttl_secs or 0.0,
            router_ttl_s=self.router_ttl_secs,
            router_max_tree_size=self.router_max_tree_size,
            router_prune_target_ratio=self.router_prune_target_ratio,
            active_decode_blocks_threshold=self.active_decode_blocks_threshold,
            active_prefill_tokens_threshold=self.active_prefill_tokens_threshold,
            active_prefill_tokens_threshold_frac=self.active_prefill_tokens_threshold_frac,
            max_requests=self.max_requests,
            decision_journal_bytes=self.decision_journal_bytes,
        )


def override_options(override: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a request wants otherwise, in the core's words.

    Raises:
        InvalidArgumentError: An unknown name: it would be a wish that nobody hears.
    """
    options: dict[str, Any] = {}
    for name, value in (override or {}).items():
        known = _OVERRIDES.get(name)
        if known is None:
            raise InvalidArgumentError(
                f"router_config_override: unknown setting {name!r}; known are "
                f"{', '.join(_OVERRIDES)}"
            )
        if value is not None:
            options[known] = value
    return options


def _in_range(name: str, value: float | None, low: float, high: float) -> None:
    if value is None:
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or math.isinf(value):
        wanted = f"of at least {low:g}" if high in (math.inf, 2**62) else f"in {low:g}..={high:g}"
        raise ConfigError(f"{name} must be a number {wanted}, got {value!r}")
