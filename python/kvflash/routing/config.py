"""Settings of a router."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from kvflash._core import RouterCore, check_policy, check_shadow_policies
from kvflash.cluster_flags import ClusterFlags
from kvflash.errors import ConfigError
from kvflash.policy import PREFIX, AskedPolicy, Policy
from kvflash.runtime.arguments import check_range
from kvflash.servers import agreed, plane_of_events
from kvflash.settings import Setting, table
from kvflash.spelling import did_you_mean

# Limits here beyond those of the flags.
_WIDER: dict[str, dict[str, Any]] = {
    "active_request_expiry_secs": {"number": (0.001, None)},
    "router_ttl_secs": {"number": (0, None)},
    "router_predicted_ttl_secs": {"number": (0, None)},
    "router_max_tree_size": {"whole": (1, 2**62)},
    "router_event_threads": {"whole": (1, 2**62)},
    "max_requests": {"whole": (1, 2**62)},
}


@dataclass(frozen=True, kw_only=True)
class KvRouterConfig:
    """How a :class:`KvPushRouter` decides.

    Attributes:
        router_mode: The routing policy: a name, several with weights, or your own class. Default:
            ``KVFLASH_ROUTING_ALGORITHM`` in the environment, else ``auto``, or ``kv`` if a setting
            of its cost is given, even with its default.
        policy_profile: Defaults of policies: ``document`` or ``aibrix-compat``.
        shadow_policies: Policies that run alongside and are only counted; at most four. A policy
            may have its own settings: ``kv:overlap_score_weight=8,temperature=0.5``.
        router_session_affinity_ttl_secs: Seconds, in 1..=31536000, for which requests with the same
            ``session_key`` stay on the worker of the earlier one, whatever the policy, unless it
            can't take one; None: the policy alone decides.
        overlap_score_weight: Cost of a block to prefill, in blocks held by running requests; 0:
            caches are ignored, and no events are subscribed to.
        overlap_score_credit: Saving of a cached block, in blocks to prefill; 0: caches are ignored,
            and no events are subscribed to.
        overlap_score_credit_decay: How fast that credit fades on workers with more prefill queued
            than the idlest worker.
        router_host_cache_hit_weight: Saving of a block that a worker holds only in host memory, in
            blocks to prefill.
        router_disk_cache_hit_weight: The same for disks and shared storage.
        prefill_load_scale: Weight of the uncached prefill cost.
        router_prefill_tokens_per_second: Prompt tokens that a worker prefills per second; "auto"
            derives the speed from its first tokens, and the tokens of the request in progress count
            less over time. None: tokens count until the first output token.
        active_request_weight: Cost of each running request, in blocks.
        router_temperature: 0 picks the cheapest worker; higher values spread the choice.
        use_kv_events: Subscribe to the workers' KV events. Otherwise a worker is assumed to hold
            what was sent to it: with auto up to 0.9 of its cache, if its size is known and
            router_ttl_secs is the default; else for router_ttl_secs.
        router_track_active_blocks: Count the blocks of running requests.
        router_track_output_blocks: Count generated blocks too.
        router_track_prefill_tokens: Count prompt tokens until the first output token.
        router_assume_kv_reuse: Count a block that several requests share once.
        router_ttl_secs: Lifetime of assumed blocks, without events; unit seconds.
        router_max_tree_size: Maximum assumed blocks over all workers; with events, maximum
            predicted blocks.
        router_prune_target_ratio: Share of them to keep when the limit is exceeded.
        router_predicted_ttl_secs: With events: seconds for which a prompt just sent to a worker
            counts as cached there, until its events arrive; None or 0 disables it.
        active_decode_blocks_threshold: Share of a worker's blocks above which it is busy.
        active_prefill_tokens_threshold: Prompt tokens to prefill above which it is busy.
        active_prefill_tokens_threshold_frac: The same as a multiple of the worker's batch.
        active_request_expiry_secs: Seconds without activity after which load is freed.
        router_queue_threshold: :meth:`KvPushRouter.generate` waits while every eligible worker has
            more prompt tokens to prefill than this multiple of its batch size; None: it never
            waits.
        router_queue_policy: Order of the queue: ``fcfs`` (first come, first served), ``lcfs`` (last
            come, first served) or ``wspt`` (least left to prefill first).
        router_queue_limit: Maximum queued requests.
        router_queue_timeout: Longest wait in the queue, and for min_initial_workers; unit seconds.
        router_queue_batched_tokens: Batch size assumed for workers that do not report one; unit
            tokens.
        max_requests: Maximum concurrent requests.
        min_initial_workers: Workers that must have been present at once before the first request is
            routed. Requests wait for them for up to router_queue_timeout; NoWorkerError after that.
            None: KVFLASH_MIN_INITIAL_WORKERS, (KVFLASH_ or DYN_)ROUTER_MIN_INITIAL_WORKERS, else 0.
        decision_journal_bytes: Memory for past decisions, for :meth:`KvPushRouter.why`.
        log_decisions: Log each decision at level info, and in auto and kv mode the cost of every
            worker.
        router_snapshot_threshold: With events over NATS: messages in the workers' stream above
            which a snapshot is taken; None: no snapshot is taken because of their number.
        router_event_threads: Accepted for compatibility; has no effect.
        durable_kv_events: Receive events over NATS; KVFLASH_EVENT_PLANE=nats sets this for all
            routers.
        router_replica_sync: Share active requests with other routers of the same workers: over ZMQ,
            or over NATS if KVFLASH_EVENT_PLANE selects it.
        router_reset_states: With events over NATS: discard the stream and its snapshot, here and at
            all replicas, and start over.

    Raises:
        ConfigError: A setting is out of range or contradicts another; the message names it.
    """

    router_mode: str | Policy | None = None
    policy_profile: str | None = None
    shadow_policies: Sequence[str] = ()
    router_session_affinity_ttl_secs: int | None = None
    overlap_score_weight: float = 1.0
    overlap_score_credit: float = 1.0
    overlap_score_credit_decay: float = 0.0
    router_host_cache_hit_weight: float = 0.75
    router_disk_cache_hit_weight: float = 0.25
    prefill_load_scale: float = 1.0
    router_prefill_tokens_per_second: float | Literal["auto"] | None = None
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
    router_queue_threshold: float | None = None
    router_queue_policy: str = "fcfs"
    router_queue_limit: int = 1_024
    router_queue_timeout: float = 60.0
    router_queue_batched_tokens: int = 10_000_000
    max_requests: int = 65_536
    min_initial_workers: int | None = None
    decision_journal_bytes: int = 16 * 1024 * 1024
    log_decisions: bool = False
    router_snapshot_threshold: int | None = 1_000_000
    router_event_threads: int = 4
    durable_kv_events: bool = False
    router_replica_sync: bool = False
    router_reset_states: bool = False
    # Whether kv is the default of router_mode.
    _is_kv_meant = False

    def __new__(cls, *_: object, **settings: object) -> KvRouterConfig:
        """Refuse an unknown setting, and suggest the closest known one."""
        known = cls.__dataclass_fields__
        for name in settings:
            if name not in known:
                raise TypeError(
                    f"{cls.__name__} has no setting {name!r}{did_you_mean(name, known)}"
                )
        config = super().__new__(cls)
        # dataclasses.replace() gives every setting: then only the core, by their values, decides.
        is_copy = len(settings) == len(known)
        if not is_copy and any(_settings()[name].is_of_formula for name in settings):
            object.__setattr__(config, "_is_kv_meant", True)
        return config

    def __post_init__(self) -> None:
        for name, setting in _settings().items():
            setting.check(name, getattr(self, name))
        self._check_policies()
        if self.durable_kv_events and not self.use_kv_events:
            raise ConfigError("durable_kv_events requires use_kv_events")
        if self.router_track_output_blocks and not self.router_track_active_blocks:
            raise ConfigError("router_track_output_blocks requires router_track_active_blocks")

    def _check_policies(self) -> None:
        shadows, mode = self.shadow_policies, self.router_mode
        if not isinstance(shadows, list | tuple) or not all(isinstance(x, str) for x in shadows):
            raise ConfigError(f"shadow_policies must be a list of policies' names, got {shadows!r}")
        try:
            check_shadow_policies(list(shadows))
        except ValueError as error:
            raise ConfigError(f"shadow_policies: {error}") from error
        is_policy = callable(getattr(mode, "choose", None)) and not isinstance(mode, type)
        if not (mode is None or isinstance(mode, str) or is_policy):
            raise ConfigError(
                "router_mode must be a policy's name, or an object with a method "
                f"choose(request, candidates), got {mode!r}"
            )
        if isinstance(mode, str) and not mode.startswith(PREFIX):
            try:
                check_policy(mode)
            except ValueError as error:
                raise ConfigError(f"router_mode: {error}") from error

    def cluster_flags(self) -> ClusterFlags:
        """What to share with replicas, and how."""
        return ClusterFlags(
            event_plane="nats" if self.durable_kv_events else plane_of_events(),
            router_replica_sync=self.router_replica_sync,
            router_snapshot_threshold=self.router_snapshot_threshold,
            router_reset_states=self.router_reset_states,
        )

    def workers_to_wait_for(self) -> int:
        """``min_initial_workers``, or what the environment says."""
        if self.min_initial_workers is not None:
            return self.min_initial_workers
        setting = _settings()["min_initial_workers"]
        name, text = agreed(*setting.all_variables()) or ("", "0")
        number_max = setting.legal["whole"][1]
        if not (text.isascii() and text.isdigit() and int(text) <= number_max):
            raise ConfigError(f"{name} must be a whole number in 0..={number_max}, got {text!r}")
        return int(text)

    def make_core(
        self,
        block_size: int,
        model_name: str = "default",
        policy: AskedPolicy | None = None,
        tenant_id: str = "default",
    ) -> RouterCore:
        """Create the core that decides by these settings, with a policy in Python if one is set.

        It follows the events over NATS of this model and tenant; prefill-only workers have a
        tenant of their own.
        """
        check_range("block_size", block_size, 1, 2**32 - 1)
        settings = {
            setting.key: getattr(self, name)
            for name, setting in _settings().items()
            if setting.section != "Replicas"
        }
        settings["policy"] = self.router_mode if isinstance(self.router_mode, str) else None
        settings["is_kv_meant"] = self._is_kv_meant
        settings["min_initial_workers"] = self.workers_to_wait_for()
        return RouterCore(
            block_size=block_size,
            model_name=model_name,
            tenant_id=tenant_id,
            policy_desk=None if policy is None else policy.desk,
            **settings,
        )


@functools.cache
def _settings() -> dict[str, Setting]:
    """Entry of each field in the table of settings."""
    by_name = {name: setting for setting in table("router") for name in setting.names}
    found = {field.name: by_name[field.name] for field in fields(KvRouterConfig)}
    # Without it the environment decides.
    found["min_initial_workers"] = replace(found["min_initial_workers"], is_optional=True)
    return found | {name: replace(found[name], legal=wider) for name, wider in _WIDER.items()}
