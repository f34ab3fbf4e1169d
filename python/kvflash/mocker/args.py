"""The command line: flags to `MockerConfig`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields

from kvflash.console import Parser
from kvflash.errors import ConfigError
from kvflash.mocker.config import MockerConfig, PortChoice
from kvflash.publisher.brokered import plane_of_events

LOG_LEVELS = ("debug", "info", "warning", "error")


def parse_args(argv: Sequence[str] | None = None) -> tuple[MockerConfig, str]:
    """Parse the command line; on an error print what is legal and exit with status 2.

    Args:
        argv: Arguments without the program's name; None means those of the process.

    Returns:
        The configuration, and the log level.

    Raises:
        SystemExit: The arguments are wrong, or help was asked for.
    """
    parser = _parser()
    values = vars(parser.parse_args(argv))
    log_level = values.pop("log_level")
    if values["endpoint"] is not None and values["event_plane"] is None:
        values["event_plane"] = _event_plane(parser)
    values["event_plane"] = values["event_plane"] or "zmq"
    values["lora_adapters"] = tuple(values["lora_adapters"])
    values["bootstrap_ports"] = tuple(values["bootstrap_ports"])
    try:
        return MockerConfig(**values), log_level
    except ConfigError as error:
        parser.error(str(error))


def _event_plane(parser: argparse.ArgumentParser) -> str:
    try:
        return plane_of_events()
    except ConfigError as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    defaults = {field.name: field.default for field in fields(MockerConfig)}
    parser = Parser(
        prog="python -m kvflash.mocker",
        description="An LLM engine without a model: OpenAI API, KV cache events, modelled time.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    # Only who has an endpoint looks at the environment.
    defaults["event_plane"] = None
    parser.set_defaults(**defaults)
    network = parser.add_argument_group("network")
    network.add_argument("--host", help="interface of the HTTP and ZMQ sockets")
    network.add_argument("--port", type=int, help="first HTTP port; worker i: +i; 0: free ports")
    network.add_argument("--num-workers", type=int, help="engines in this process")
    network.add_argument(
        "--max-waiting", type=int, help="requests that may wait for admission; then 429"
    )
    network.add_argument("--model-name", help="served model name")
    network.add_argument(
        "--lora-adapters", nargs="*", metavar="NAME", help="LoRA adapters, served as models"
    )
    network.add_argument(
        "--tokenizer",
        "--model-path",
        metavar="FOLDER",
        help="Hugging Face tokenizer folder; default: bytes",
    )
    network.add_argument(
        "--drain-timeout",
        dest="drain_timeout_s",
        type=float,
        metavar="SECONDS",
        help="time for running requests to end after SIGTERM",
    )
    network.add_argument("--log-level", choices=LOG_LEVELS, default="info", help="on stderr")

    cache = parser.add_argument_group("KV cache")
    cache.add_argument("--block-size", type=int, help="tokens per block")
    cache.add_argument(
        "--num-gpu-blocks",
        "--num-gpu-blocks-override",
        type=int,
        help="blocks of the cache of one worker",
    )
    cache.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        help="reuse blocks across requests",
    )
    cache.add_argument(
        "--watermark", type=float, help="share of the cache that admission keeps free, 0..1"
    )

    batching = parser.add_argument_group("batching and time")
    batching.add_argument("--max-num-seqs", type=int, help="requests that run at a time")
    batching.add_argument("--max-num-batched-tokens", type=int, help="tokens of one pass")
    batching.add_argument(
        "--max-model-len",
        type=int,
        help="longest prompt plus output in tokens; default: what the cache holds",
    )
    batching.add_argument(
        "--enable-chunked-prefill",
        action=argparse.BooleanOptionalAction,
        help="cut prompts that do not fit into a pass",
    )
    batching.add_argument("--speedup-ratio", type=float, help="modelled time / real time")
    batching.add_argument(
        "--startup-time",
        dest="startup_time_s",
        type=float,
        metavar="SECONDS",
        help="time before a worker is ready",
    )

    events = parser.add_argument_group("events")
    events.add_argument(
        "--zmq-events-port",
        type=_port_choice,
        help="first port of block events; worker i: +i; 0: none; auto: free ports",
    )
    events.add_argument(
        "--zmq-replay-port",
        type=_port_choice,
        help="first port of event replay; worker i: +i; 0: none; auto: free ports",
    )
    events.add_argument("--event-era", choices=("positional", "tagged"), help="wire shape")
    events.add_argument("--event-topic", help="ZMQ topic")
    events.add_argument("--replay-buffer", type=int, help="event batches kept for replay")
    events.add_argument("--data-parallel-rank", type=int, help="rank in every event batch")
    runtime = parser.add_argument_group("runtime and roles")
    runtime.add_argument(
        "--endpoint",
        metavar="NAMESPACE.COMPONENT.ENDPOINT",
        help="register there through the runtime, tokens in and out, instead of serving HTTP",
    )
    runtime.add_argument(
        "--kv-events",
        action=argparse.BooleanOptionalAction,
        help="with --endpoint: publish block events, on free ports where none are named",
    )
    runtime.add_argument(
        "--event-plane",
        default=argparse.SUPPRESS,
        choices=("zmq", "nats"),
        help="with --endpoint: how block events go: on sockets, or to the NATS server that "
        "NATS_SERVER names; default: KVFLASH_EVENT_PLANE, else zmq",
    )
    runtime.add_argument(
        "--enable-local-indexer",
        action="store_true",
        help="with --event-plane nats: routers ask this worker for what they missed, instead of a "
        "stream",
    )
    runtime.add_argument(
        "--data-parallel-size", type=int, help="ranks of one worker; needs --endpoint"
    )
    roles = runtime.add_mutually_exclusive_group()
    for role in ("prefill", "decode"):
        roles.add_argument(
            f"--is-{role}-worker",
            dest="role",
            action="store_const",
            const=role,
            help="compute prompts only" if role == "prefill" else "take over computed prompts",
        )
    roles.add_argument(
        "--disaggregation-mode",
        dest="role",
        type=_role,
        metavar="agg|prefill|decode",
        help="the same, in one flag",
    )
    runtime.add_argument(
        "--bootstrap-ports",
        type=_ports,
        metavar="PORT,...",
        help="one per prefill worker: decode workers wait there for its results, as SGLang's do",
    )
    return parser


def _role(text: str) -> str:
    roles = {"agg": "both", "both": "both", "prefill": "prefill", "decode": "decode"}
    if text not in roles:
        raise argparse.ArgumentTypeError(f"must be agg, prefill or decode, got {text!r}")
    return roles[text]


def _ports(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(port) for port in text.split(",") if port)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be ports with commas, got {text!r}") from None


def _port_choice(text: str) -> PortChoice:
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a port, 0 or auto, got {text!r}") from None
