"""Flags of the launchers; all other flags belong to the engine."""

import argparse
import shlex
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from kvflash import console
from kvflash.errors import ConfigError
from kvflash.launcher.command import Arguments, EventPorts
from kvflash.servers import EVENT_PLANES, plane_of_events

ROLES = ("agg", "decode", "prefill")
_ATTEMPTS = 100


@dataclass(frozen=True, kw_only=True)
class LauncherOptions:
    """Settings of a launcher.

    Attributes:
        endpoint: Where the engine is registered, namespace.component.endpoint.
        role: agg, prefill or decode.
        program: Words that start the engine, before its arguments.
        kv_events: Switch the engine's events on.
        event_plane: How routers hear of them: ``zmq`` from its sockets, ``nats`` over NATS.
        enable_local_indexer: With ``nats``: over NATS Core, from an index of the worker's own.
        ready_timeout_s: Time that the engine gets to load.
        drain_timeout_s: Time that its requests get after a signal, before it gets that signal.
        stop_timeout_s: Time that it gets to end after that, before it is killed.
    """

    endpoint: str
    program: list[str]
    role: str = "agg"
    kv_events: bool = True
    event_plane: str = "zmq"
    enable_local_indexer: bool = False
    ready_timeout_s: float = 3600.0
    drain_timeout_s: float = 30.0
    stop_timeout_s: float = 60.0


def parse_options(
    engine: str, program: Sequence[str], argv: Sequence[str]
) -> tuple[LauncherOptions, Arguments]:
    """Split a command line into the launcher's flags and the engine's.

    Args:
        engine: Name of the engine, for the help.
        program: How it is started by default.
        argv: Arguments without the program's name.

    Raises:
        SystemExit: A launcher flag is wrong, or help was requested.
    """
    parser = console.Parser(
        prog=console.program(engine),
        description=f"Start {engine} with KV events and register it; other flags are passed on.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--endpoint",
        metavar="NAMESPACE.COMPONENT.ENDPOINT",
        help="endpoint to register it at; default: dynamo.backend.generate, or "
        "dynamo.prefill.generate for prefill",
    )
    parser.add_argument(
        "--engine-command",
        type=_words,
        default=shlex.join(program),
        help="command that starts the engine",
    )
    parser.add_argument(
        "--kv-events", action=argparse.BooleanOptionalAction, default=True, help="switch them on"
    )
    parser.add_argument(
        "--event-plane",
        choices=EVENT_PLANES,
        help="how routers hear of them: zmq from the engine's sockets; nats: they are relayed to "
        "the server that NATS_SERVER names; default: KVFLASH_EVENT_PLANE, else zmq",
    )
    parser.add_argument(
        "--enable-local-indexer",
        action="store_true",
        help="with --event-plane nats: routers ask an index in this process for what they missed, "
        "instead of a stream",
    )
    parser.add_argument(
        "--ready-timeout", type=float, default=3600.0, help="seconds for the engine to load"
    )
    parser.add_argument(
        "--drain-timeout",
        type=float,
        default=30.0,
        help="seconds for its requests to finish after a signal, before it gets the signal; "
        "0: it gets the signal at once",
    )
    parser.add_argument(
        "--stop-timeout",
        type=float,
        default=60.0,
        help="seconds to wait for it to exit after it got the signal",
    )
    roles = parser.add_mutually_exclusive_group()
    for role in ("prefill", "decode"):
        flag = f"--is-{role}-worker"
        roles.add_argument(flag, dest="role", action="store_const", const=role, help="its role")
    roles.add_argument(
        "--disaggregation-mode", dest="role", choices=ROLES, help="the role, as one flag"
    )
    known, rest = parser.parse_known_args(list(argv))
    role = known.role or "agg"
    component = "prefill" if role == "prefill" else "backend"
    for flag in ("ready_timeout", "stop_timeout"):
        if not 0 < getattr(known, flag) < float("inf"):
            parser.error(f"--{flag.replace('_', '-')} must be above 0")
    if not 0 <= known.drain_timeout < float("inf"):
        parser.error("--drain-timeout must be at least 0")
    try:
        event_plane = plane_of_events(known.event_plane)
    except ConfigError as error:
        parser.error(str(error))
    options = LauncherOptions(
        endpoint=known.endpoint or f"dynamo.{component}.generate",
        role=role,
        program=known.engine_command,
        kv_events=known.kv_events,
        event_plane=event_plane,
        enable_local_indexer=known.enable_local_indexer,
        ready_timeout_s=known.ready_timeout,
        drain_timeout_s=known.drain_timeout,
        stop_timeout_s=known.stop_timeout,
    )
    return options, Arguments([word for word in rest if word != "--"])


def _words(text: str) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error} in {text!r}") from None
    if not words:
        raise argparse.ArgumentTypeError("must name a program")
    return words


def free_ports(count: int) -> int:
    """The first of ``count`` consecutive free ports; other processes may take them before use.

    Raises:
        ConfigError: No such ports are free.
    """
    for _ in range(_ATTEMPTS):
        with ExitStack() as held:
            first = held.enter_context(socket.socket())
            first.bind(("", 0))
            port = int(first.getsockname()[1])
            try:
                for other in range(port + 1, port + count):
                    held.enter_context(socket.socket()).bind(("", other))
            except (OSError, OverflowError):
                continue
            return port
    raise ConfigError(f"no {count} free ports in a row")


def http_port(arguments: Arguments) -> int:
    """The engine's HTTP port: as given, or a free one."""
    port = arguments.number("--port")
    if port is None:
        port = free_ports(1)
        arguments.add("--port", port)
    return port


def engine_events(
    options: LauncherOptions, arguments: Arguments, ranks: int, **more: object
) -> EventPorts | None:
    """Where the engine publishes: as given, or at free ports, with ``more`` for its config.

    Raises:
        ConfigError: The given events can't be announced, or no ports are free.
    """
    said = arguments.document("--kv-events-config")
    if not options.kv_events:
        return None
    if said is not None:
        return EventPorts.of(said)
    first = free_ports(2 * ranks)
    events = EventPorts(port=first, replay_port=first + ranks)
    arguments.add("--kv-events-config", events.config(**more))
    return events
