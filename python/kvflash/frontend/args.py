"""Flags of the frontend."""

from __future__ import annotations

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

__all__ = ["FrontendArgs", "parse_args"]

_POLICIES = ("kv", "round-robin", "random", "least-loaded", "power-of-two")


@dataclass(frozen=True, kw_only=True)
class FrontendArgs:
    """The frontend's settings; see ``--help``."""

    host: str
    port: int
    threads: int
    log_level: str
    log_format: str
    workers: list[str]
    router_mode: str
    kv_overlap_score_weight: float
    router_temperature: float
    kv_cache_block_size: int | None
    track_active_blocks: bool
    assume_kv_reuse: bool
    active_request_expiry: float
    seed: int | None
    use_kv_events: bool
    router_predicted_ttl_secs: float | None
    router_ttl: float
    router_max_tree_size: int
    router_prune_target_ratio: float
    active_decode_blocks_threshold: float | None
    active_prefill_tokens_threshold: int | None
    active_prefill_tokens_threshold_frac: float | None
    decision_journal: int
    serve_indexer: bool
    use_remote_indexer: str | None
    remote_indexer_deadline: float
    tokenizer: str | None
    tokenizer_cache: int
    worker_api_key: str | None
    max_body_bytes: int
    max_concurrent_requests: int
    max_workers: int
    max_attempts: int
    max_blocks: int
    index_memory: int
    body_timeout: float
    connect_timeout: float
    first_byte_timeout: float
    tokenize_timeout: float
    health_interval: float
    drain_timeout: float


def parse_args(argv: Sequence[str] | None = None) -> FrontendArgs:
    """Parse the command line and the environment."""
    flags = Flags(
        "python -m kvflash.frontend",
        "OpenAI-compatible frontend that sends each request to the worker for which it is "
        "cheapest: most of its prompt cached, least of other work.",
    )
    add_common(flags, port=8000, threads=2, extra_names=True)
    flags.add_list(
        "--worker",
        dest="workers",
        metavar="URL[,events=ADDRESS][,replay=ADDRESS][,id=N][,dp=N]",
        summary="an OpenAI-compatible engine, with the sockets of its KV events and their replay; "
        "may be given many times, and added later with POST /workers",
    )
    flags.add(
        "--router-mode",
        parse=str,
        default="kv",
        choices=_POLICIES,
        summary="how a worker is chosen",
    )
    flags.add(
        "--kv-overlap-score-weight",
        "--router-kv-overlap-score-weight",
        variables=("DYN_KV_OVERLAP_SCORE_WEIGHT",),
        parse=bounded_float(0),
        default=1.0,
        summary="what a block to prefill costs, in blocks held by running requests; 0: caches do not "
        "count, and no events are listened to",
    )
    flags.add(
        "--router-temperature",
        parse=bounded_float(0),
        default=0.0,
        summary="0 takes the cheapest worker; more spreads the choice",
    )
    flags.add(
        "--kv-cache-block-size",
        parse=bounded_int(1, 2**32 - 1),
        default=None,
        summary="tokens in a block; learned from the engines when not given",
    )
    flags.add_switch(
        "--no-track-active-blocks",
        dest="track_active_blocks",
        value=False,
        summary="leave the blocks of running requests out of the cost (prefill-only workers)",
    )
    flags.add_switch(
        "--no-assume-kv-reuse",
        dest="assume_kv_reuse",
        value=False,
        summary="count every request's blocks in full, also where running requests share them",
    )
    flags.add(
        "--active-request-expiry",
        parse=bounded_float(1),
        default=300.0,
        summary="seconds without any activity after which a request's load is freed",
    )
    flags.add_switch(
        "--no-kv-events",
        "--no-router-kv-events",
        dest="use_kv_events",
        value=False,
        summary="listen to no events: a worker is believed to hold what was sent to it lately",
    )
    flags.add(
        "--router-ttl",
        "--router-ttl-secs",
        variables=("DYN_ROUTER_TTL",),
        parse=bounded_float(0, 86_400 * 365),
        default=120.0,
        summary="without events: seconds for which a worker is believed to hold what was sent to it",
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
        parse=optional(bounded_float(0, 86_400)),
        default=5.0,
        summary="with events: seconds for which what was just sent to a worker counts as cached "
        "there, until its events tell; 0 or None counts nothing",
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
        "--decision-journal",
        parse=size_or_zero,
        default=16 * 1024 * 1024,
        metavar="SIZE",
        summary="memory for past decisions, which GET /why/{request id} tells; 0 keeps none",
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
    flags.add(
        "--seed",
        parse=bounded_int(0, 2**64 - 1),
        default=None,
        summary="seed of random choices between equals, for runs that can be repeated",
    )
    flags.add(
        "--tokenizer",
        parse=str,
        default=None,
        metavar="FOLDER",
        summary="folder with tokenizer.json and the chat template; without it the engines' own "
        "/tokenize is asked",
    )
    flags.add(
        "--tokenizer-cache",
        parse=byte_count,
        default=256 * 1024 * 1024,
        summary="memory for tokens of text seen before, bytes",
    )
    flags.add(
        "--worker-api-key",
        parse=str,
        default=None,
        summary="key for the frontend's own calls to the workers (better set in the environment); "
        "clients' requests carry their own",
    )
    flags.add(
        "--max-body-bytes",
        parse=byte_count,
        default=32 * 1024 * 1024,
        summary="largest request body; larger ones are refused with 413",
    )
    flags.add(
        "--max-concurrent-requests",
        parse=bounded_int(1, 10**7),
        default=4_096,
        summary="requests in flight; more are refused with 429",
    )
    flags.add(
        "--max-workers",
        parse=bounded_int(1, 65_535),
        default=4_096,
        summary="engines that may be registered",
    )
    flags.add(
        "--max-attempts",
        parse=bounded_int(1, 1_000),
        default=5,
        summary="workers that a request may try before its first byte",
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
    for name, default, summary in (
        ("--body-timeout", 60.0, "seconds in which a request's body must arrive"),
        ("--connect-timeout", 2.0, "seconds to connect to a worker"),
        (
            "--first-byte-timeout",
            600.0,
            "seconds from sending a request to a worker to the first byte of its answer",
        ),
        ("--tokenize-timeout", 2.0, "seconds for an engine's /tokenize"),
        ("--health-interval", 2.0, "seconds between two health checks of a worker"),
    ):
        flags.add(name, parse=bounded_float(0.001, 86_400), default=default, summary=summary)
    flags.add(
        "--drain-timeout",
        parse=bounded_float(0, 86_400),
        default=30.0,
        summary="seconds that running requests get after SIGTERM",
    )
    return FrontendArgs(**vars(flags.parse(argv)))
