"""The flags that decide how requests are routed, for every process that routes.

Each has its ``KVFLASH_...`` variable; the names that other versions of the flags had, and the
``DYN_...`` variables of those who come from there, mean the same.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import Any, Literal

from kvflash._core import check_policy
from kvflash.config import (
    bounded_float,
    bounded_int,
    memory_limit,
    number_or_auto,
    optional,
    size_or_zero,
)
from kvflash.dynamo_policy import translate
from kvflash.errors import ConfigError
from kvflash.flags import Flags

__all__ = ["RouterFlags", "add_router_flags", "settle"]


#: What ``--use-remote-indexer`` says without a URL: the one in discovery.
FOUND = "discovery"


@dataclass(frozen=True, kw_only=True)
class RouterFlags:
    """What the flags say; see ``--help``."""

    router_mode: str | None = None
    policy_profile: str | None = None
    shadow_policies: list[str] = field(default_factory=list)
    router_session_affinity_ttl_secs: int | None = None
    load_aware: bool = False
    is_kv_meant: bool = False
    kv_overlap_score_weight: float = 1.0
    router_kv_overlap_score_credit: float = 1.0
    router_kv_overlap_score_credit_decay: float = 0.0
    router_host_cache_hit_weight: float = 0.75
    router_disk_cache_hit_weight: float = 0.25
    router_prefill_load_scale: float = 1.0
    router_prefill_tokens_per_second: float | Literal["auto"] | None = None
    router_active_request_weight: float = 0.0
    router_temperature: float = 0.0
    kv_cache_block_size: int | None = None
    track_active_blocks: bool = True
    track_output_blocks: bool = False
    track_prefill_tokens: bool = True
    assume_kv_reuse: bool = True
    active_request_expiry: float = 300.0
    use_kv_events: bool = True
    router_predicted_ttl_secs: float | None = 5.0
    router_ttl: float = 120.0
    is_router_ttl_meant: bool = False
    router_max_tree_size: int = 1_048_576
    router_prune_target_ratio: float = 0.8
    active_decode_blocks_threshold: float | None = None
    active_prefill_tokens_threshold: int | None = None
    active_prefill_tokens_threshold_frac: float | None = None
    router_queue_threshold: float | None = None
    router_queue_policy: str = "fcfs"
    router_queue_limit: int = 1_024
    router_queue_timeout: float = 60.0
    router_queue_batched_tokens: int = 10_000_000
    decision_journal: int = 16 * 1024 * 1024
    log_decisions: bool = False
    min_initial_workers: int = 0
    max_blocks: int = 33_554_432
    index_memory: int = 0
    seed: int | None = None
    router_event_threads: int = 4
    serve_indexer: bool = False
    use_remote_indexer: str | None = None
    remote_indexer_deadline: float = 0.05

    @property
    def finds_indexer(self) -> bool:
        """Whether the remote indexer is found in discovery."""
        return self.use_remote_indexer == FOUND

    def core_settings(self) -> dict[str, Any]:
        """The same by the names that the core's services have for them, but for the block size."""
        return {
            "policy": self.router_mode,
            "is_kv_meant": self.is_kv_meant,
            "policy_profile": self.policy_profile,
            "shadow_policies": self.shadow_policies,
            "session_affinity_ttl_s": self.router_session_affinity_ttl_secs,
            "overlap_score_weight": self.kv_overlap_score_weight,
            "overlap_score_credit": self.router_kv_overlap_score_credit,
            "overlap_score_credit_decay": self.router_kv_overlap_score_credit_decay,
            "host_cache_hit_weight": self.router_host_cache_hit_weight,
            "disk_cache_hit_weight": self.router_disk_cache_hit_weight,
            "prefill_load_scale": self.router_prefill_load_scale,
            "prefill_tokens_per_s": self.router_prefill_tokens_per_second,
            "active_request_weight": self.router_active_request_weight,
            "temperature": self.router_temperature,
            "track_active_blocks": self.track_active_blocks,
            "track_output_blocks": self.track_output_blocks,
            "track_prefill_tokens": self.track_prefill_tokens,
            "assume_kv_reuse": self.assume_kv_reuse,
            "active_request_expiry_s": self.active_request_expiry,
            "seed": self.seed,
            "use_kv_events": self.use_kv_events,
            "predicted_ttl_s": self.router_predicted_ttl_secs or 0.0,
            "router_ttl_s": self.router_ttl,
            "is_router_ttl_meant": self.is_router_ttl_meant,
            "router_max_tree_size": self.router_max_tree_size,
            "router_prune_target_ratio": self.router_prune_target_ratio,
            "active_decode_blocks_threshold": self.active_decode_blocks_threshold,
            "active_prefill_tokens_threshold": self.active_prefill_tokens_threshold,
            "active_prefill_tokens_threshold_frac": self.active_prefill_tokens_threshold_frac,
            "router_queue_threshold": self.router_queue_threshold,
            "router_queue_policy": self.router_queue_policy,
            "router_queue_limit": self.router_queue_limit,
            "router_queue_timeout_s": self.router_queue_timeout,
            "router_queue_batched_tokens": self.router_queue_batched_tokens,
            "decision_journal_bytes": self.decision_journal,
            "log_decisions": self.log_decisions,
            "min_initial_workers": self.min_initial_workers,
            "max_blocks": self.max_blocks,
            "index_memory_bytes": self.index_memory,
            "serve_indexer": self.serve_indexer,
            "remote_indexer": "" if self.finds_indexer else self.use_remote_indexer,
            "remote_indexer_deadline_s": self.remote_indexer_deadline,
        }


def add_router_flags(flags: Flags, *, block_size: tuple[str, ...] = ()) -> None:
    """Add them, and the file that may set them and all up to :meth:`Flags.end_of_file`.

    ``block_size`` are further names of ``--kv-cache-block-size``.
    """
    flags.section("Routing")
    flags.add_file(
        "--router-policy-config",
        variables=("DYN_ROUTER_POLICY_CONFIG",),
        summary="Read routing flags from this file, or Dynamo's policy file",
        translate=translate,
    )
    flags.add(
        "--router-mode",
        variables=("DYN_ROUTER_MODE",),
        parse=_policy,
        default=None,
        metavar="POLICY",
        summary="auto (default), kv, round-robin, random, least-loaded, ...; see docs/policies.md",
    )
    flags.add(
        "--policy-profile",
        parse=str,
        default=None,
        choices=("document", "aibrix-compat"),
        summary="Defaults of AIBrix's policies: as documented (default) or as its code has them",
    )
    flags.add_list(
        "--shadow-policy",
        dest="shadow_policies",
        metavar="POLICY",
        summary="Run up to 4 policies beside the real one, to compare them in /metrics",
    )
    flags.add(
        "--router-session-affinity-ttl-secs",
        variables=("DYN_ROUTER_SESSION_AFFINITY_TTL_SECS",),
        parse=optional(bounded_int(1, 31_536_000)),
        default=None,
        metavar="SECONDS",
        summary="Keep a session on its worker until it was idle for so long; None: off",
    )
    flags.add_switch(
        "--load-aware",
        dest="load_aware",
        value=True,
        summary="Balance by load alone and ignore caches",
    )
    flags.preset("load_aware", _LOAD_AWARE)
    flags.mark("is_kv_meant", _COST_OF_KV)
    _add_cost(flags)
    flags.add(
        "--router-temperature",
        variables=("DYN_ROUTER_TEMPERATURE",),
        parse=bounded_float(0),
        default=0.0,
        summary="Randomness of the choice; 0 takes the cheapest worker",
    )
    flags.add(
        "--kv-cache-block-size",
        *block_size,
        variables=("DYN_KV_CACHE_BLOCK_SIZE",),
        parse=optional(bounded_int(1, 2**32 - 1)),
        default=None,
        metavar="TOKENS",
        summary="Tokens per KV block; learned from the engines if not given",
    )
    _add_accounts(flags)
    _add_knowledge(flags)
    _add_thresholds(flags)
    _add_queue(flags)
    flags.section("Decisions")
    flags.add(
        "--decision-journal",
        parse=size_or_zero,
        default=16 * 1024 * 1024,
        metavar="SIZE",
        summary="Memory for past decisions (GET /why/{request_id}); 0 keeps none",
    )
    flags.add_switch(
        "--log-decisions",
        dest="log_decisions",
        value=True,
        summary="Log every decision, with the cost of every worker in auto and kv mode",
    )
    flags.add(
        "--min-initial-workers",
        "--router-min-initial-workers",
        variables=("DYN_ROUTER_MIN_INITIAL_WORKERS",),
        parse=bounded_int(0, 65_535),
        default=0,
        metavar="COUNT",
        summary="Refuse requests until so many workers have been healthy",
    )
    flags.add(
        "--seed",
        parse=bounded_int(0, 2**64 - 1),
        default=None,
        summary="Seed of random choices, for repeatable runs",
    )
    _add_index(flags)
    _add_indexer(flags)
    _add_compatible(flags)


def _policy(text: str) -> str:
    """Check the name of a policy."""
    if text.startswith("python:"):
        if not all(text.split(":")) or text.count(":") != 2:
            raise argparse.ArgumentTypeError(f"must be python:module:Class, got {text!r}")
        return text
    try:
        check_policy(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


#: What only the cost of ``kv`` knows: who sets one of them means that mode.
_COST_OF_KV = (
    "kv_overlap_score_weight",
    "router_kv_overlap_score_credit",
    "router_kv_overlap_score_credit_decay",
    "router_prefill_load_scale",
    "router_prefill_tokens_per_second",
    "router_active_request_weight",
    "track_active_blocks",
    "track_output_blocks",
    "track_prefill_tokens",
    "assume_kv_reuse",
)

#: What ``--load-aware`` stands for.
_LOAD_AWARE = {
    "router_mode": "kv",
    "router_kv_overlap_score_credit": 0.0,
    "use_kv_events": False,
    "assume_kv_reuse": False,
    "track_active_blocks": True,
    "track_prefill_tokens": True,
}


def settle(values: dict[str, Any]) -> dict[str, Any]:
    """What the presets among ``values`` make of the others.

    Raises:
        ConfigError: Two of them contradict each other.
    """
    if values["load_aware"]:
        mode = values["router_mode"]
        if mode not in (None, "kv"):
            raise ConfigError(f"--load-aware is --router-mode kv, which contradicts {mode}")
        values = values | _LOAD_AWARE
    if values["use_remote_indexer"] == "":
        raise ConfigError("--use-remote-indexer must be http://host:port of an indexer, got ''")
    if values["use_remote_indexer"] is not None and not values["use_kv_events"]:
        off = "--load-aware" if values["load_aware"] else "--no-kv-events"
        raise ConfigError(f"--use-remote-indexer needs KV events, which {off} switches off")
    return values


def _add_cost(flags: Flags) -> None:
    flags.section("Cost of a worker (kv mode)")
    flags.add(
        "--kv-overlap-score-weight",
        "--router-kv-overlap-score-weight",
        variables=("DYN_KV_OVERLAP_SCORE_WEIGHT", "DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT"),
        parse=bounded_float(0),
        default=1.0,
        summary="Cost of a block to prefill, relative to a running block; 0 ignores caches",
    )
    flags.add(
        "--router-kv-overlap-score-credit",
        variables=("DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT",),
        parse=bounded_float(0),
        default=1.0,
        summary="Saving of a cached block, in blocks to prefill; above 1 favors caches",
    )
    flags.add(
        "--router-kv-overlap-score-credit-decay",
        variables=("DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY",),
        parse=bounded_float(0),
        default=0.0,
        summary="How fast that credit fades on workers with more queued prefill",
    )
    for tier, default, where in (("host", 0.75, "in host memory"), ("disk", 0.25, "on disk")):
        flags.add(
            f"--router-{tier}-cache-hit-weight",
            variables=(f"DYN_ROUTER_{tier.upper()}_CACHE_HIT_WEIGHT",),
            parse=bounded_float(0),
            default=default,
            summary=f"Saving of a block held {where} only, in blocks to prefill",
        )
    flags.add(
        "--router-prefill-load-scale",
        variables=("DYN_ROUTER_PREFILL_LOAD_SCALE",),
        parse=bounded_float(0),
        default=1.0,
        summary="Weight of the uncached prefill cost",
    )
    flags.add(
        "--router-prefill-tokens-per-second",
        parse=optional(number_or_auto),
        default=None,
        metavar="N|auto",
        summary="Prefill speed, to discount prompts in progress; auto learns it",
    )
    flags.add(
        "--router-active-request-weight",
        "--router-decode-active-request-weight",
        variables=("DYN_ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT",),
        parse=bounded_float(0),
        default=0.0,
        summary="Cost of each running request, in blocks",
    )


def _add_accounts(flags: Flags) -> None:
    flags.section("Load that counts")
    flags.add_toggle(
        "track_active_blocks",
        on=("--track-active-blocks", "--router-track-active-blocks"),
        off=("--no-track-active-blocks", "--no-router-track-active-blocks"),
        default=True,
        variables=("DYN_ROUTER_TRACK_ACTIVE_BLOCKS",),
        summary="Count the blocks of running requests; off for prefill-only workers",
    )
    flags.add_toggle(
        "track_output_blocks",
        on=("--router-track-output-blocks",),
        off=("--no-router-track-output-blocks",),
        default=False,
        variables=("DYN_ROUTER_TRACK_OUTPUT_BLOCKS",),
        summary="Count generated blocks, too",
    )
    flags.add_toggle(
        "track_prefill_tokens",
        on=("--track-prefill-tokens", "--router-track-prefill-tokens"),
        off=("--no-track-prefill-tokens", "--no-router-track-prefill-tokens"),
        default=True,
        variables=("DYN_ROUTER_TRACK_PREFILL_TOKENS",),
        summary="Count prompt tokens until the first token; off for decode-only workers",
    )
    flags.add_toggle(
        "assume_kv_reuse",
        on=("--assume-kv-reuse", "--router-assume-kv-reuse"),
        off=("--no-assume-kv-reuse", "--no-router-assume-kv-reuse"),
        default=True,
        variables=("DYN_ROUTER_ASSUME_KV_REUSE",),
        summary="Count a block that running requests share once",
    )
    flags.add(
        "--active-request-expiry",
        variables=("DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS",),
        parse=bounded_float(1),
        default=300.0,
        metavar="SECONDS",
        summary="Free a request's load after so long without activity",
    )


def _add_knowledge(flags: Flags) -> None:
    flags.section("What workers hold")
    flags.add_toggle(
        "use_kv_events",
        on=("--kv-events", "--router-kv-events"),
        off=("--no-kv-events", "--no-router-kv-events"),
        default=True,
        variables=("DYN_KV_EVENTS", "DYN_ROUTER_KV_EVENTS"),
        summary="Listen to the engines' events; off: assume that prompts sent stay cached",
    )
    flags.mark("is_router_ttl_meant", ("router_ttl",))
    flags.add(
        "--router-ttl",
        "--router-ttl-secs",
        variables=("DYN_ROUTER_TTL", "DYN_ROUTER_TTL_SECS"),
        parse=bounded_float(0, 86_400 * 365),
        default=120.0,
        metavar="SECONDS",
        summary="Without events: how long a prompt counts as cached",
    )
    flags.add(
        "--router-max-tree-size",
        variables=("DYN_ROUTER_MAX_TREE_SIZE",),
        parse=bounded_int(1, 2**40),
        default=1_048_576,
        metavar="BLOCKS",
        summary="Maximum blocks that count as cached so, summed over workers",
    )
    flags.add(
        "--router-prune-target-ratio",
        variables=("DYN_ROUTER_PRUNE_TARGET_RATIO",),
        parse=bounded_float(0, 1),
        default=0.8,
        summary="Share of --router-max-tree-size left after the oldest are dropped",
    )
    flags.add(
        "--router-predicted-ttl-secs",
        variables=("DYN_ROUTER_PREDICTED_TTL_SECS",),
        parse=optional(bounded_float(0, 86_400)),
        default=5.0,
        metavar="SECONDS",
        summary="With events: count a prompt as cached for so long before its events arrive",
    )


def _add_compatible(flags: Flags) -> None:
    flags.section("Compatibility")
    flags.add(
        "--router-event-threads",
        variables=("DYN_ROUTER_EVENT_THREADS",),
        parse=bounded_int(1, 1_024),
        default=4,
        summary="Accepted for compatibility; has no effect",
    )


def _add_thresholds(flags: Flags) -> None:
    flags.section("Busy workers and the queue")
    flags.add(
        "--active-decode-blocks-threshold",
        "--busy-threshold",
        variables=("DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD", "DYN_BUSY_THRESHOLD"),
        parse=optional(bounded_float(0, 1)),
        default=None,
        summary="Send no requests to workers with more than this share of blocks in use",
    )
    flags.add(
        "--active-prefill-tokens-threshold",
        variables=("DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD",),
        parse=optional(bounded_int(0, 2**64 - 1)),
        default=None,
        metavar="TOKENS",
        summary="Send no requests to workers with more tokens left to prefill",
    )
    flags.add(
        "--active-prefill-tokens-threshold-frac",
        variables=("DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD_FRAC",),
        parse=optional(bounded_float(0)),
        default=None,
        summary="The same limit, as a multiple of the worker's largest batch",
    )


def _add_queue(flags: Flags) -> None:
    flags.add(
        "--router-queue-threshold",
        variables=("DYN_ROUTER_QUEUE_THRESHOLD",),
        parse=optional(bounded_float(0)),
        default=None,
        summary="Queue while every worker has more to prefill than so many batches; None: never",
    )
    flags.add(
        "--router-queue-policy",
        variables=("DYN_ROUTER_QUEUE_POLICY",),
        parse=str,
        default="fcfs",
        choices=("fcfs", "lcfs", "wspt"),
        summary="Who goes first: first come, last come, or shortest prefill",
    )
    flags.add(
        "--router-queue-limit",
        parse=bounded_int(1, 10**7),
        default=1_024,
        summary="Maximum queued requests per model; more are refused with 429",
    )
    flags.add(
        "--router-queue-timeout",
        parse=bounded_float(0.001, 86_400),
        default=60.0,
        metavar="SECONDS",
        summary="Longest wait in the queue before a request is refused with 503",
    )
    flags.add(
        "--router-queue-batched-tokens",
        parse=bounded_int(1, 2**62),
        default=10_000_000,
        metavar="TOKENS",
        summary="Largest batch of workers that do not report theirs",
    )


def _add_index(flags: Flags) -> None:
    flags.section("Index")
    flags.add(
        "--max-blocks",
        parse=bounded_int(0, 2**48),
        default=33_554_432,
        metavar="BLOCKS",
        summary="Maximum blocks in the index of one model; 0: no limit",
    )
    flags.add(
        "--index-memory",
        parse=memory_limit,
        default=0,
        metavar="SIZE",
        summary="Maximum memory of one model's index, such as 8GiB; 0: no limit",
    )


def _add_indexer(flags: Flags) -> None:
    flags.add_switch(
        "--serve-indexer",
        dest="serve_indexer",
        value=True,
        summary="Also answer the indexer's API: /query, /query_by_hash, /dump, /digest",
    )
    flags.add(
        "--use-remote-indexer",
        parse=str,
        default=None,
        metavar="URL",
        bare=FOUND,
        summary="Ask this kvflash indexer, or the one in discovery, instead of listening to events",
    )
    flags.add(
        "--remote-indexer-deadline",
        parse=bounded_float(0.001, 60),
        default=0.05,
        metavar="SECONDS",
        summary="Longest wait for its answer; after it a request is routed by load alone",
    )
