"""The command line: flags to `MockerConfig`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from kvflash.config import add_config
from kvflash.config_file import joined
from kvflash.errors import ConfigError
from kvflash.flags import Flags
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
    flags = _flags()
    values = vars(flags.parse(argv))
    log_level = values.pop("log_level")
    values["role"] = _role_of(values, flags)
    for name in ("lora_adapters", "bootstrap_ports"):
        values[name] = tuple(values[name])
    try:
        if values["event_plane"] is None:
            # Without an endpoint the environment does not count.
            values["event_plane"] = "zmq" if values["endpoint"] is None else plane_of_events()
        return MockerConfig(**values), log_level
    except ConfigError as error:
        flags.error(str(error))
        raise


def _role_of(values: dict[str, Any], flags: Flags) -> str:
    """The role that one of three flags names."""
    said = {
        "--is-prefill-worker": "prefill" if values.pop("is_prefill_worker") else None,
        "--is-decode-worker": "decode" if values.pop("is_decode_worker") else None,
        "--disaggregation-mode": values.pop("role"),
    }
    given = [flag for flag, role in said.items() if role is not None]
    if len(given) > 1:
        flags.error(f"argument {given[1]}: not allowed with argument {given[0]}")
    return said[given[0]] or "both" if given else "both"


def _flags() -> Flags:
    flags = Flags(
        "mocker",
        "An LLM engine without a model: OpenAI API, KV cache events, modelled time.",
        first=(
            "--config",
            "--host",
            "--port",
            "--num-workers",
            "--model-name",
            "--tokenizer",
            "--block-size",
            "--num-gpu-blocks",
            "--zmq-events-port",
            "--speedup-ratio",
        ),
        # It runs beside the services that KVFLASH_PORT and the others are meant for.
        has_variables=False,
    )
    add_config(flags)
    _add_server(flags)
    _add_engine(flags)
    _add_events(flags)
    _add_runtime(flags)
    return flags


def _adder(flags: Flags) -> Callable[..., None]:
    """Adds a flag with the default of its option."""
    defaults = {field.name: field.default for field in fields(MockerConfig)}

    def add(*names: str, summary: str, parse: Callable[[str], Any] = str, **more: Any) -> None:
        option = more.get("dest") or names[0][2:].replace("-", "_")
        more = {"default": defaults.get(option), **more}
        flags.add(*names, parse=parse, summary=summary, **more)

    return add


def _add_server(flags: Flags) -> None:
    add = _adder(flags)
    flags.section("Server and log")
    add("--host", metavar="ADDRESS", summary="Address of the HTTP and ZMQ sockets")
    add("--port", parse=int, summary="First HTTP port, worker i: +i; 0: free ports")
    add("--num-workers", parse=int, summary="Engines in this process")
    add("--max-waiting", parse=int, summary="Maximum waiting requests; more are refused with 429")
    add("--model-name", metavar="NAME", summary="Name of the model")
    flags.add_list(
        "--lora-adapters",
        dest="lora_adapters",
        metavar="NAME",
        summary="LoRA adapters, served as models",
    )
    add(
        "--tokenizer",
        "--model-path",
        metavar="FOLDER",
        summary="Hugging Face tokenizer folder; without it a token is a byte",
    )
    add(
        "--drain-timeout",
        dest="drain_timeout_s",
        parse=float,
        metavar="SECONDS",
        summary="Time for running requests after SIGTERM",
    )
    add(
        "--log-level",
        choices=LOG_LEVELS,
        default="info",
        metavar="LEVEL",
        summary="debug, info, warning or error",
    )


def _add_engine(flags: Flags) -> None:
    add = _adder(flags)
    flags.section("KV cache")
    add("--block-size", parse=int, metavar="TOKENS", summary="Tokens per KV block")
    add(
        "--num-gpu-blocks",
        "--num-gpu-blocks-override",
        parse=int,
        metavar="BLOCKS",
        summary="Blocks in the cache of one worker",
    )
    _add_toggle(flags, "enable_prefix_caching", "Reuse blocks across requests")
    add("--watermark", parse=float, summary="Share of the cache that admission keeps free")
    flags.section("Batching and time")
    add("--max-num-seqs", parse=int, summary="Requests that run at a time")
    add("--max-num-batched-tokens", parse=int, metavar="TOKENS", summary="Tokens of one pass")
    add(
        "--max-model-len",
        parse=int,
        metavar="TOKENS",
        summary="Longest prompt plus output; without it what the cache holds",
    )
    _add_toggle(flags, "enable_chunked_prefill", "Split prompts that do not fit into a pass")
    add("--speedup-ratio", parse=float, summary="Modelled time divided by real time")
    add(
        "--startup-time",
        dest="startup_time_s",
        parse=float,
        metavar="SECONDS",
        summary="Time before a worker is ready",
    )


def _add_events(flags: Flags) -> None:
    add = _adder(flags)
    flags.section("Events")
    for name, what in (("events", "block events"), ("replay", "event replay")):
        add(
            f"--zmq-{name}-port",
            parse=_port_choice,
            metavar="N|auto",
            summary=f"First port of {what}, worker i: +i; 0: none; auto: free ports",
        )
    add("--event-era", choices=("positional", "tagged"), summary="Encoding of events")
    add("--event-topic", metavar="TOPIC", summary="ZMQ topic")
    add("--replay-buffer", parse=int, summary="Event batches kept for replay")
    add("--data-parallel-rank", parse=int, summary="Rank in every event batch")


def _add_runtime(flags: Flags) -> None:
    add = _adder(flags)
    flags.section("Runtime and roles")
    add(
        "--endpoint",
        metavar="NAMESPACE.COMPONENT.ENDPOINT",
        summary="Serve this endpoint of the runtime instead of HTTP",
    )
    _add_toggle(flags, "kv_events", "With --endpoint: publish block events")
    add(
        "--event-plane",
        choices=("zmq", "nats"),
        default=None,
        summary="With --endpoint: how events go; else KVFLASH_EVENT_PLANE, else zmq",
    )
    flags.add_switch(
        "--enable-local-indexer",
        dest="enable_local_indexer",
        value=True,
        summary="With nats: routers ask this worker for missed events instead of a stream",
    )
    add("--data-parallel-size", parse=int, summary="Ranks of one worker; needs --endpoint")
    for role, summary in (
        ("prefill", "Only compute prompts"),
        ("decode", "Only take over prompts"),
    ):
        flags.add_switch(
            f"--is-{role}-worker", dest=f"is_{role}_worker", value=True, summary=summary
        )
    add(
        "--disaggregation-mode",
        dest="role",
        parse=_role,
        default=None,
        metavar="agg|prefill|decode",
        summary="The same in one flag",
    )
    add(
        "--bootstrap-ports",
        parse=_ports,
        in_file=joined(_ports),
        metavar="PORT,...",
        summary="One per prefill worker, where decode workers wait, as with SGLang",
    )


def _add_toggle(flags: Flags, dest: str, summary: str) -> None:
    """A flag that is on, with its opposite."""
    name = dest.replace("_", "-")
    flags.add_toggle(dest, on=[f"--{name}"], off=[f"--no-{name}"], default=True, summary=summary)


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
