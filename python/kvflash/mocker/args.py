"""The command line: flags to `MockerConfig`."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, TypeVar, get_args, get_type_hints

from kvflash.config import add_config
from kvflash.config_file import joined
from kvflash.errors import ConfigError
from kvflash.flags import Flags
from kvflash.mocker.config import EventEra, MockerConfig, PortChoice

T = TypeVar("T")

LOG_LEVELS = ("debug", "info", "warning", "error")


def parse_args(argv: Sequence[str] | None = None) -> tuple[MockerConfig, str]:
    """Parse the command line to a configuration and the log level; exits with 2 on an error."""
    flags = _flags()
    values = vars(flags.parse(argv))
    log_level = values.pop("log_level")
    values["role"] = _role_of(values, flags)
    for name in ("lora_adapters", "bootstrap_ports"):
        values[name] = tuple(values[name])
    try:
        if values["event_plane"] is None:
            values["event_plane"] = _plane_of(values["endpoint"])
        return MockerConfig(**values), log_level
    except ConfigError as error:
        flags.error(str(error))
        raise


def _plane_of(endpoint: str | None) -> str:
    """The event plane of the environment, which counts only with an endpoint."""
    if endpoint is None:
        return "zmq"
    # Here, because few workers have an endpoint.
    from kvflash.servers import plane_of_events  # noqa: PLC0415

    return plane_of_events()


def _role_of(values: dict[str, Any], flags: Flags) -> str:
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
        # The mocker runs beside the services that KVFLASH_PORT and the others are meant for.
        has_variables=False,
    )
    add_config(flags)
    for section in _TABLE:
        _add(flags, section)
    _add_roles(flags)
    flags.section("Server and log")
    flags.add(
        "--log-level",
        choices=LOG_LEVELS,
        default="info",
        metavar="LEVEL",
        summary="debug, info, warning or error",
    )
    return flags


def _add(flags: Flags, section: str) -> None:
    flags.section(section)
    for line in _TABLE[section].strip().splitlines():
        spelled, _, summary = line.strip().partition(": ")
        words = spelled.split()
        names = [word for word in words if word.startswith("--")]
        metavar = words[-1] if words[-1] not in names else None
        name = names[0][2:].replace("-", "_")
        option = name if name in _KINDS else f"{name}_s"
        kind, default = _KINDS[option], _DEFAULTS[option]
        if kind is bool:
            off = [f"--no-{names[0][2:]}"] if default else []
            flags.add_toggle(option, on=names, off=off, default=default, summary=summary)
        elif option == "lora_adapters":
            flags.add_list(names[0], dest=option, metavar=metavar or "", summary=summary)
        else:
            parse = _PARSERS.get(kind, str)
            choices = get_args(kind) if kind is EventEra else None
            flags.add(
                *names, parse=parse, default=default, dest=option, metavar=metavar, choices=choices,
                in_file=joined(parse) if parse is _ports else None, summary=summary,
            )  # fmt: skip


def _add_roles(flags: Flags) -> None:
    flags.add(
        "--event-plane",
        choices=("zmq", "nats"),
        summary="With --endpoint: transport of events; default: KVFLASH_EVENT_PLANE, else zmq",
    )
    for role, summary in (
        ("prefill", "Only compute prompts"),
        ("decode", "Only decode prompts that a prefill worker computed"),
    ):
        flags.add_toggle(f"is_{role}_worker", on=[f"--is-{role}-worker"], summary=summary)
    flags.add(
        "--disaggregation-mode",
        dest="role",
        parse=_role,
        metavar="agg|prefill|decode",
        summary="The role, as one flag",
    )


def _parser(read: Callable[[str], T], wanted: str) -> Callable[[str], T]:
    """A parser without limits: MockerConfig has them, and names the flag where one is broken."""

    def parse(text: str) -> T:
        try:
            return read(text)
        except (KeyError, ValueError):
            raise argparse.ArgumentTypeError(f"must be {wanted}, got {text!r}") from None

    return parse


_ROLES = {"agg": "both", "both": "both", "prefill": "prefill", "decode": "decode"}
_role = _parser(_ROLES.__getitem__, "agg, prefill or decode")
_whole = _parser(int, "a whole number")
_ports = _parser(
    lambda text: tuple(int(port) for port in text.split(",") if port), "ports, separated by commas"
)
_port_choice: Callable[[str], PortChoice] = _parser(
    lambda text: "auto" if text == "auto" else int(text), "a port, 0 or auto"
)

# Flags and their metavars, by section; options define types and defaults.
_TABLE = {
    "Server and log": """
        --host ADDRESS: Address of the HTTP and ZMQ sockets
        --port: HTTP port of the first worker, +1 for each further one; 0: free ports
        --num-workers: Number of mock engines in this process
        --max-waiting: Maximum waiting requests; more are refused with 429
        --model-name NAME: Name of the model
        --lora-adapters NAME: LoRA adapters, served as models
        --tokenizer --model-path FOLDER: Hugging Face tokenizer folder; without it a token is a byte
        --drain-timeout SECONDS: Time for running requests to finish after SIGTERM
    """,
    "KV cache": """
        --block-size TOKENS: Tokens per KV block
        --num-gpu-blocks --num-gpu-blocks-override BLOCKS: Blocks in the cache of one worker
        --enable-prefix-caching: Reuse blocks across requests
        --watermark: Share of the cache that admission keeps free
    """,
    "Batching and time": """
        --max-num-seqs: Maximum running requests
        --max-num-batched-tokens TOKENS: Maximum tokens of one pass
        --max-model-len TOKENS: Longest prompt plus output; unset: what the cache holds
        --enable-chunked-prefill: Split prompts that do not fit into a pass
        --speedup-ratio: Modelled time divided by real time; 2 runs twice as fast
        --startup-time SECONDS: Time before a worker is ready
    """,
    "Events": """
        --zmq-events-port N|auto: Event port of the first worker; 0: no events; auto: free ports
        --zmq-replay-port N|auto: Replay port of the first worker; 0: no replay; auto: free ports
        --event-era: Encoding of events
        --event-topic TOPIC: ZMQ topic
        --replay-buffer: Event batches kept for replay
        --data-parallel-rank: Rank in every event batch
    """,
    "Runtime and roles": """
        --endpoint NAMESPACE.COMPONENT.ENDPOINT: Serve this endpoint of the runtime instead of HTTP
        --kv-events: With --endpoint: publish block events
        --enable-local-indexer: With nats: routers request missed events from this worker
        --data-parallel-size: Ranks of each worker; needs --endpoint
        --bootstrap-ports PORT,...: One per prefill worker; decode workers connect there
    """,
}
_KINDS = get_type_hints(MockerConfig)
_DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(MockerConfig)}
_PARSERS: dict[Any, Callable[[str], Any]] = {
    int: _whole,
    int | None: _whole,
    float: _parser(float, "a number"),
    PortChoice: _port_choice,
    tuple[int, ...]: _ports,
}
