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
    Flags,
    bounded_float,
    bounded_int,
    memory_limit,
    number_or_auto,
    optional,
    size_or_zero,
)
from kvflash.errors import ConfigError

__all__ = ["RouterFlags", "add_router_flags", "settle"]


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
            "remote_indexer": self.use_remote_indexer,
            "remote_indexer_deadline_s": self.remote_indexer_deadline,
        }


def add_router_flags(flags: Flags, *, block_size: tuple[str, ...] = ()) -> None:
    """Add them, and the file that may set them and all up to :meth:`Flags.end_of_file`.

    ``block_size`` are further names of ``--kv-cache-block-size``.
    """
    flags.add_file(
        "--router-policy-config",
        variables=("DYN_ROUTER_POLICY_CONFIG",),
        summary="JSON file that sets what is about routing; command line and environment go first",
    )
    flags.add(
        "--router-mode",
        variables=("DYN_ROUTER_MODE",),
        parse=_policy,
        default=None,
        metavar="POLICY",
        summary="how a worker is chosen: auto (the default), kv (the default where a weight of its "
        "cost is set), round-robin, random, least-loaded, power-of-two, prefix-cache, "
        "vtc-basic, session-affinity, least-request, ..., or several "
        "with weights, such as prefix-cache:2,least-request:1; or python:module:Class",
    )
    flags.add(
        "--policy-profile",
        parse=str,
        default=None,
        choices=("document", "aibrix-compat"),
        summary="defaults of the policies: those that AIBrix documents (document, the default), or "
        "those of its code with its faults (aibrix-compat)",
    )
    flags.add_list(
        "--shadow-policy",
        dest="shadow_policies",
        metavar="POLICY",
        summary="a policy that runs beside and decides nothing, to be compared in /metrics; may "
        "have settings of its own, such as kv:overlap_score_weight=8,temperature=0.5; may be given "
        "up to 4 times",
    )
    flags.add(
        "--router-session-affinity-ttl-secs",
        variables=("DYN_ROUTER_SESSION_AFFINITY_TTL_SECS",),
        parse=optional(bounded_int(1, 31_536_000)),
        default=None,
        metavar="SECONDS",
        summary="whatever the policy: a session with a key stays where its last request went, "
        "until that worker can't take one or nothing came for so long; None (the default): never",
    )
    flags.add_switch(
        "--load-aware",
        dest="load_aware",
        value=True,
        summary="balance load without any knowledge of caches: kv mode with "
        "--router-kv-overlap-score-credit 0 --no-kv-events --no-assume-kv-reuse",
    )
    flags.preset("load_aware", _LOAD_AWARE)
    flags.mark("is_kv_meant", _COST_OF_KV)
    _add_cost(flags)
    flags.add(
        "--router-temperature",
        variables=("DYN_ROUTER_TEMPERATURE",),
        parse=bounded_float(0),
        default=0.0,
        summary="0 takes the cheapest worker; more spreads the choice",
    )
    flags.add(
        "--kv-cache-block-size",
        *block_size,
        variables=("DYN_KV_CACHE_BLOCK_SIZE",),
        parse=optional(bounded_int(1, 2**32 - 1)),
        default=None,
        summary="tokens in a block; learned from the engines when not given",
    )
    _add_accounts(flags)
    _add_knowledge(flags)
    _add_thresholds(flags)
    _add_queue(flags)
    flags.add(
        "--decision-journal",
        parse=size_or_zero,
        default=16 * 1024 * 1024,
        metavar="SIZE",
        summary="memory for past decisions, which GET /why/{request id} tells; 0 keeps none",
    )
    flags.add_switch(
        "--log-decisions",
        dest="log_decisions",
        value=True,
        summary="log each decision at level info, and in auto and kv mode the cost of every worker",
    )
    flags.add(
        "--min-initial-workers",
        "--router-min-initial-workers",
        variables=("DYN_ROUTER_MIN_INITIAL_WORKERS",),
        parse=bounded_int(0, 65_535),
        default=0,
        metavar="COUNT",
        summary="workers that must have been there once, healthy, before /ready says so and the "
        "frontend takes requests",
    )
    flags.add(
        "--seed",
        parse=bounded_int(0, 2**64 - 1),
        default=None,
        summary="seed of random choices between equals, for runs that can be repeated",
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
    if values["use_remote_indexer"] is not None and not values["use_kv_events"]:
        off = "--load-aware" if values["load_aware"] else "--no-kv-events"
        raise ConfigError(f"--use-remote-indexer needs KV events, which {off} switches off")
    return values


def _add_cost(flags: Flags) -> None:
    flags.add(
        "--kv-overlap-score-weight",
        "--router-kv-overlap-score-weight",
        variables=("DYN_KV_OVERLAP_SCORE_WEIGHT", "DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT"),
        parse=bounded_float(0),
        default=1.0,
        summary="what a block to prefill costs, in blocks held by running requests; 0: caches do "
        "not count, and no events are listened to",
    )
    flags.add(
        "--router-kv-overlap-score-credit",
        variables=("DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT",),
        parse=bounded_float(0),
        default=1.0,
        summary="what a cached block saves, in blocks to prefill; more than 1 keeps prompts with "
        "their caches for longer before load spreads them",
    )
    flags.add(
        "--router-kv-overlap-score-credit-decay",
        variables=("DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY",),
        parse=bounded_float(0),
        default=0.0,
        summary="how fast that credit fades where more prefill is queued than at the idlest worker",
    )
    for tier, default, where in (("host", 0.75, "in host memory"), ("disk", 0.25, "on disks")):
        flags.add(
            f"--router-{tier}-cache-hit-weight",
            variables=(f"DYN_ROUTER_{tier.upper()}_CACHE_HIT_WEIGHT",),
            parse=bounded_float(0),
            default=default,
            summary=f"what a block saves that a worker holds {where} only, in blocks to prefill",
        )
    flags.add(
        "--router-prefill-load-scale",
        variables=("DYN_ROUTER_PREFILL_LOAD_SCALE",),
        parse=bounded_float(0),
        default=1.0,
        summary="what the rest to prefill counts, credit taken off",
    )
    flags.add(
        "--router-prefill-tokens-per-second",
        parse=optional(number_or_auto),
        default=None,
        summary="prompt tokens that a worker prefills in a second, or auto for what its first "
        "tokens show: those of the request that it works on count less and less; None counts them "
        "until their first token",
    )
    flags.add(
        "--router-active-request-weight",
        "--router-decode-active-request-weight",
        variables=("DYN_ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT",),
        parse=bounded_float(0),
        default=0.0,
        summary="what each running request costs, in blocks",
    )


def _add_accounts(flags: Flags) -> None:
    flags.add_toggle(
        "track_active_blocks",
        on=("--track-active-blocks", "--router-track-active-blocks"),
        off=("--no-track-active-blocks", "--no-router-track-active-blocks"),
        default=True,
        variables=("DYN_ROUTER_TRACK_ACTIVE_BLOCKS",),
        summary="count the blocks of running requests in the cost (off: prefill-only workers)",
    )
    flags.add_toggle(
        "track_output_blocks",
        on=("--router-track-output-blocks",),
        off=("--no-router-track-output-blocks",),
        default=False,
        variables=("DYN_ROUTER_TRACK_OUTPUT_BLOCKS",),
        summary="count the blocks that running requests generate, too",
    )
    flags.add_toggle(
        "track_prefill_tokens",
        on=("--track-prefill-tokens", "--router-track-prefill-tokens"),
        off=("--no-track-prefill-tokens", "--no-router-track-prefill-tokens"),
        default=True,
        variables=("DYN_ROUTER_TRACK_PREFILL_TOKENS",),
        summary="count running requests' prompt tokens until their first token (off: workers "
        "that do not prefill)",
    )
    flags.add_toggle(
        "assume_kv_reuse",
        on=("--assume-kv-reuse", "--router-assume-kv-reuse"),
        off=("--no-assume-kv-reuse", "--no-router-assume-kv-reuse"),
        default=True,
        variables=("DYN_ROUTER_ASSUME_KV_REUSE",),
        summary="count a block that running requests share once (off: every request in full)",
    )
    flags.add(
        "--active-request-expiry",
        variables=("DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS",),
        parse=bounded_float(1),
        default=300.0,
        summary="seconds without any activity after which a request's load is freed",
    )


def _add_knowledge(flags: Flags) -> None:
    flags.add_toggle(
        "use_kv_events",
        on=("--kv-events", "--router-kv-events"),
        off=("--no-kv-events", "--no-router-kv-events"),
        default=True,
        variables=("DYN_KV_EVENTS", "DYN_ROUTER_KV_EVENTS"),
        summary="listen to the engines' events (off: a worker is believed to hold what was sent "
        "to it lately)",
    )
    flags.mark("is_router_ttl_meant", ("router_ttl",))
    flags.add(
        "--router-ttl",
        "--router-ttl-secs",
        variables=("DYN_ROUTER_TTL", "DYN_ROUTER_TTL_SECS"),
        parse=bounded_float(0, 86_400 * 365),
        default=120.0,
        summary="without events: seconds for which a worker is believed to hold what was sent; "
        "auto goes by the size of the worker's cache where it is known, unless this is given",
    )
    flags.add(
        "--router-max-tree-size",
        variables=("DYN_ROUTER_MAX_TREE_SIZE",),
        parse=bounded_int(1, 2**40),
        default=1_048_576,
        summary="blocks that are believed so, counted per worker; beyond it the oldest go",
    )
    flags.add(
        "--router-prune-target-ratio",
        variables=("DYN_ROUTER_PRUNE_TARGET_RATIO",),
        parse=bounded_float(0, 1),
        default=0.8,
        summary="share of --router-max-tree-size that is left then",
    )
    flags.add(
        "--router-predicted-ttl-secs",
        variables=("DYN_ROUTER_PREDICTED_TTL_SECS",),
        parse=optional(bounded_float(0, 86_400)),
        default=5.0,
        summary="with events: seconds for which what was just sent to a worker counts as cached "
        "there, until its events tell; 0 or None counts nothing",
    )


def _add_compatible(flags: Flags) -> None:
    flags.add(
        "--router-event-threads",
        variables=("DYN_ROUTER_EVENT_THREADS",),
        parse=bounded_int(1, 1_024),
        default=4,
        summary="taken and not used: one thread receives events, and queries wait for nobody",
    )


def _add_thresholds(flags: Flags) -> None:
    flags.add(
        "--active-decode-blocks-threshold",
        "--busy-threshold",
        variables=("DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD", "DYN_BUSY_THRESHOLD"),
        parse=optional(bounded_float(0, 1)),
        default=None,
        summary="share of a worker's blocks in use above which it gets no requests",
    )
    flags.add(
        "--active-prefill-tokens-threshold",
        variables=("DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD",),
        parse=optional(bounded_int(0, 2**64 - 1)),
        default=None,
        summary="prompt tokens still to be prefilled above which a worker gets no requests",
    )
    flags.add(
        "--active-prefill-tokens-threshold-frac",
        variables=("DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD_FRAC",),
        parse=optional(bounded_float(0)),
        default=None,
        summary="the same as a multiple of the tokens that the worker takes in one batch",
    )


def _add_queue(flags: Flags) -> None:
    flags.add(
        "--router-queue-threshold",
        variables=("DYN_ROUTER_QUEUE_THRESHOLD",),
        parse=optional(bounded_float(0)),
        default=None,
        summary="a request waits while every worker that may take it has more prompt tokens to "
        "prefill than this multiple of what it takes in one batch; None (the default): it never "
        "waits",
    )
    flags.add(
        "--router-queue-policy",
        variables=("DYN_ROUTER_QUEUE_POLICY",),
        parse=str,
        default="fcfs",
        choices=("fcfs", "lcfs", "wspt"),
        summary="who is first when there is room: who came first, who came last, or who has the "
        "least left to prefill",
    )
    flags.add(
        "--router-queue-limit",
        parse=bounded_int(1, 10**7),
        default=1_024,
        summary="requests of one model that may wait so; more are refused with 429",
    )
    flags.add(
        "--router-queue-timeout",
        parse=bounded_float(0.001, 86_400),
        default=60.0,
        summary="seconds that a request waits so before it is refused with 503",
    )
    flags.add(
        "--router-queue-batched-tokens",
        parse=bounded_int(1, 2**62),
        default=10_000_000,
        summary="what a worker takes in one batch that did not tell",
    )


def _add_index(flags: Flags) -> None:
    flags.add(
        "--max-blocks",
        parse=bounded_int(0, 2**48),
        default=33_554_432,
        summary="blocks that one model's index may hold, 0 = no limit",
    )
    flags.add(
        "--index-memory",
        parse=memory_limit,
        default=0,
        metavar="SIZE",
        summary="memory that the index of one model and tenant may occupy, such as 8GiB, 512MiB or "
        "plain bytes, 0 = no limit; near it the least recently stored blocks go",
    )


def _add_indexer(flags: Flags) -> None:
    flags.add_switch(
        "--serve-indexer",
        dest="serve_indexer",
        value=True,
        summary="answer the indexer's questions, too: /query, /query_by_hash, /dump, /digest",
    )
    flags.add(
        "--use-remote-indexer",
        parse=str,
        default=None,
        metavar="URL",
        summary="ask this kvflash indexer what workers hold (worker ids are its instance ids) "
        "instead of listening to their events",
    )
    flags.add(
        "--remote-indexer-deadline",
        parse=bounded_float(0.001, 60),
        default=0.05,
        metavar="SECONDS",
        summary="time for its answer; without one a request is routed by load alone, and counted",
    )
