"""Flags of the standalone router."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from kvflash.config import (
    Flags,
    add_common,
    bounded_float,
    bounded_int,
    byte_count,
    memory_limit,
    optional,
    size_or_zero,
)
from kvflash.errors import ConfigError

__all__ = ["RouterArgs", "WorkerSpec", "parse_args", "parse_worker"]

_POLICIES = ("kv", "round-robin", "random", "least-loaded", "power-of-two")


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """One ``--worker``.

    Attributes:
        worker_id: Its number; None = one above those given before it.
        url: What gateways reach it by, handed back as it is.
        dp_size: Its ranks.
        events: Address of rank 0's event socket; rank r is at its port + r.
        replay: Address of rank 0's replay socket.
    """

    url: str
    worker_id: int | None = None
    dp_size: int = 1
    events: str | None = None
    replay: str | None = None


@dataclass(frozen=True, kw_only=True)
class RouterArgs:
    """The router's settings, one a flag; see ``--help``."""

    host: str = "0.0.0.0"
    port: int = 8091
    threads: int = 2
    log_level: str = "info"
    log_format: str = "text"
    endpoint: str | None = None
    workers: tuple[WorkerSpec, ...] = ()
    model_name: str = "default"
    tenant_id: str = "default"
    router_mode: str = "kv"
    router_block_size: int | None = None
    kv_overlap_score_weight: float = 1.0
    router_temperature: float = 0.0
    use_kv_events: bool = True
    track_active_blocks: bool = True
    assume_kv_reuse: bool = True
    track_prefill_tokens: bool = True
    router_ttl: float = 120.0
    router_max_tree_size: int = 1_048_576
    router_prune_target_ratio: float = 0.8
    router_predicted_ttl_secs: float | None = 5.0
    serve_indexer: bool = False
    use_remote_indexer: str | None = None
    remote_indexer_deadline: float = 0.05
    active_decode_blocks_threshold: float | None = None
    active_prefill_tokens_threshold: int | None = None
    active_prefill_tokens_threshold_frac: float | None = None
    active_request_expiry: float = 300.0
    decision_journal: int = 16 * 1024 * 1024
    seed: int | None = None
    min_initial_workers: int = 0
    max_body_bytes: int = 8 * 1024 * 1024
    max_concurrent_requests: int = 65_536
    max_workers: int = 4_096
    max_blocks: int = 33_554_432
    index_memory: int = 0
    body_timeout: float = 60.0
    drain_timeout: float = 5.0

    def __post_init__(self) -> None:
        """Check what holds for every caller.

        Raises:
            ConfigError: Names the flag, what is legal and what came.
        """
        if self.endpoint is not None:
            parse_endpoint(self.endpoint)
        if not self.model_name:
            raise ConfigError("--model-name must not be empty")


def parse_endpoint(text: str) -> tuple[str, str, str]:
    """Parse ``namespace.component.endpoint``.

    Raises:
        ConfigError: There are not exactly three parts.
    """
    parts = text.split(".")
    if len(parts) != 3 or not all(parts):
        raise ConfigError(
            f"--endpoint must be namespace.component.endpoint, exactly three parts, got {text!r}"
        )
    return parts[0], parts[1], parts[2]


def _endpoint(text: str) -> str:
    try:
        parse_endpoint(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("--endpoint ")) from None
    return text


def parse_worker(text: str) -> WorkerSpec:
    """Parse ``URL[,events=ADDRESS][,replay=ADDRESS][,id=N][,dp=N]``.

    Raises:
        ConfigError: Names the part at fault.
    """
    url, *parts = (part.strip() for part in text.split(","))
    if not url or "=" in url.partition("://")[0]:
        raise ConfigError(f"--worker {text!r}: the address of the worker comes first")
    given: dict[str, str] = {}
    for part in parts:
        key, separator, value = part.partition("=")
        if key not in ("events", "replay", "id", "dp") or not separator or not value:
            raise ConfigError(
                f"--worker {text!r}: {part!r} is not key=value; known are events, replay, id, dp"
            )
        if key in given:
            raise ConfigError(f"--worker {text!r}: {key} is there twice")
        given[key] = value

    def number(key: str, low: int, high: int) -> int | None:
        value = given.get(key)
        if value is None:
            return None
        if not (value.isascii() and value.isdigit() and low <= int(value) <= high):
            raise ConfigError(
                f"--worker {text!r}: {key} must be a number in {low}..={high}, got {value!r}"
            )
        return int(value)

    return WorkerSpec(
        url=url,
        worker_id=number("id", 0, 2**64 - 1),
        dp_size=number("dp", 1, 1_024) or 1,
        events=given.get("events"),
        replay=given.get("replay"),
    )


def parse_args(argv: Sequence[str] | None = None) -> RouterArgs:
    """Parse the command line and the environment.

    Raises:
        ConfigError: A worker that is none.
    """
    flags = Flags(
        "python -m kvflash.router",
        "The routing decision as a service of its own, for gateways that forward requests "
        "themselves: select, reserve, prefill_complete, free.",
    )
    add_common(flags, port=8091, threads=2, extra_names=True)
    _add_workers(flags)
    _add_decision(flags)
    _add_knowledge(flags)
    _add_limits(flags)
    given = vars(flags.parse(argv))
    given["workers"] = tuple(parse_worker(text) for text in given["workers"])
    return RouterArgs(**given)


def _add_workers(flags: Flags) -> None:
    flags.add(
        "--endpoint",
        parse=_endpoint,
        default=None,
        variables=("KVFLASH_ROUTER_ENDPOINT", "DYN_ROUTER_ENDPOINT"),
        metavar="NAMESPACE.COMPONENT.ENDPOINT",
        summary="route to the workers that serve this endpoint, found through discovery, and serve "
        "NAMESPACE.router.generate and NAMESPACE.router.best_worker_id",
    )
    flags.add_list(
        "--worker",
        dest="workers",
        metavar="URL[,events=ADDRESS][,replay=ADDRESS][,id=N][,dp=N]",
        summary="a worker of --model-name, with the sockets of its KV events and their replay; may "
        "be given many times, and added later with POST /workers",
    )
    flags.add("--model-name", parse=str, default="default", summary="model of --worker")
    flags.add("--tenant-id", parse=str, default="default", summary="tenant of --worker")
    flags.add(
        "--min-initial-workers",
        "--router-min-initial-workers",
        parse=bounded_int(0, 65_535),
        default=0,
        variables=("KVFLASH_ROUTER_MIN_INITIAL_WORKERS", "DYN_ROUTER_MIN_INITIAL_WORKERS"),
        metavar="COUNT",
        summary="workers to wait for before GET /ready says that the service is",
    )


def _add_decision(flags: Flags) -> None:
    flags.add(
        "--router-mode",
        parse=str,
        default="kv",
        choices=_POLICIES,
        variables=("DYN_ROUTER_MODE",),
        summary="how a worker is chosen",
    )
    flags.add(
        "--router-block-size",
        "--block-size",
        "--kv-cache-block-size",
        parse=optional(bounded_int(1, 2**32 - 1)),
        default=None,
        variables=("KVFLASH_BLOCK_SIZE", "KVFLASH_KV_CACHE_BLOCK_SIZE"),
        summary="tokens in a block; learned from the workers when not given; a worker that says "
        "otherwise is refused",
    )
    flags.add(
        "--kv-overlap-score-weight",
        "--router-kv-overlap-score-weight",
        parse=bounded_float(0),
        default=1.0,
        variables=("DYN_KV_OVERLAP_SCORE_WEIGHT",),
        summary="what a block to prefill costs, in blocks held by running requests; 0: caches do "
        "not count, and no events are listened to",
    )
    flags.add(
        "--router-temperature",
        parse=bounded_float(0),
        default=0.0,
        variables=("DYN_ROUTER_TEMPERATURE",),
        summary="0 takes the cheapest worker; more spreads the choice",
    )
    for dest, name, summary in (
        (
            "track_active_blocks",
            "track-active-blocks",
            "count the blocks of running requests (off for prefill-only workers)",
        ),
        (
            "assume_kv_reuse",
            "assume-kv-reuse",
            "count blocks that running requests share once (off where blocks are transferred)",
        ),
        (
            "track_prefill_tokens",
            "track-prefill-tokens",
            "count prompt tokens until prefill_complete (off for decode-only workers)",
        ),
    ):
        flags.add_toggle(
            dest,
            on=(f"--router-{name}", f"--{name}"),
            off=(f"--no-router-{name}", f"--no-{name}"),
            default=True,
            summary=summary,
        )
    flags.add(
        "--active-decode-blocks-threshold",
        "--busy-threshold",
        parse=optional(bounded_float(0, 1)),
        default=None,
        summary="share of a worker's blocks in use above which it gets no requests",
    )
    flags.add(
        "--active-prefill-tokens-threshold",
        parse=optional(bounded_int(0, 2**64 - 1)),
        default=None,
        summary="prompt tokens still to be prefilled above which a worker gets no requests",
    )
    flags.add(
        "--active-prefill-tokens-threshold-frac",
        parse=optional(bounded_float(0)),
        default=None,
        summary="the same as a multiple of the tokens that the worker takes in one batch",
    )
    flags.add(
        "--active-request-expiry",
        parse=bounded_float(1),
        default=300.0,
        variables=("DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS",),
        summary="seconds without any word of a reservation after which its load is freed",
    )
    flags.add(
        "--seed",
        parse=bounded_int(0, 2**64 - 1),
        default=None,
        summary="seed of random choices between equals, for runs that can be repeated",
    )


def _add_knowledge(flags: Flags) -> None:
    flags.add_toggle(
        "use_kv_events",
        on=("--router-kv-events", "--kv-events"),
        off=("--no-router-kv-events", "--no-kv-events"),
        default=True,
        variables=("DYN_KV_EVENTS",),
        summary="listen to the workers' events; off: a worker is believed to hold what was sent "
        "to it lately",
    )
    flags.add(
        "--router-ttl",
        "--router-ttl-secs",
        parse=bounded_float(0, 86_400 * 365),
        default=120.0,
        variables=("DYN_ROUTER_TTL",),
        summary="without events: seconds for which a worker is believed to hold what was sent it",
    )
    flags.add(
        "--router-max-tree-size",
        parse=bounded_int(1, 2**40),
        default=1_048_576,
        variables=("DYN_ROUTER_MAX_TREE_SIZE",),
        summary="blocks that are believed so, counted per worker; beyond it the oldest go",
    )
    flags.add(
        "--router-prune-target-ratio",
        parse=bounded_float(0, 1),
        default=0.8,
        variables=("DYN_ROUTER_PRUNE_TARGET_RATIO",),
        summary="share of --router-max-tree-size that is left then",
    )
    flags.add(
        "--router-predicted-ttl-secs",
        parse=optional(bounded_float(0, 86_400)),
        default=5.0,
        summary="with events: seconds for which what was just sent to a worker counts as cached "
        "there, until its events tell; 0 or None counts nothing",
    )

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


def _add_limits(flags: Flags) -> None:
    flags.add(
        "--decision-journal",
        parse=size_or_zero,
        default=16 * 1024 * 1024,
        metavar="SIZE",
        summary="memory for past decisions, which GET /why/{request id} tells; 0 keeps none",
    )
    flags.add(
        "--max-body-bytes",
        parse=byte_count,
        default=8 * 1024 * 1024,
        summary="largest request body; larger ones are refused with 413",
    )
    flags.add(
        "--max-concurrent-requests",
        parse=bounded_int(1, 10**7),
        default=65_536,
        summary="reservations per model; more are refused with 429",
    )
    flags.add(
        "--max-workers",
        parse=bounded_int(1, 65_535),
        default=4_096,
        summary="workers that may be registered",
    )
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
    flags.add(
        "--body-timeout",
        parse=bounded_float(0.001, 86_400),
        default=60.0,
        summary="seconds in which a request's body must arrive",
    )
    flags.add(
        "--drain-timeout",
        parse=bounded_float(0, 86_400),
        default=5.0,
        summary="seconds that running calls get after SIGTERM",
    )
