"""Flags of the launchers; all other flags belong to the engine."""

import argparse
import json
import logging
import os
import random
import shlex
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from kvflash import console
from kvflash.ask import checked_key
from kvflash.config import bounded_float
from kvflash.errors import ConfigError
from kvflash.launcher.command import Arguments, EventPorts
from kvflash.servers import EVENT_PLANES, plane_of_events

logger = logging.getLogger(__name__)

ROLES = ("agg", "decode", "prefill")
_ATTEMPTS = 100
# Flags with which vLLM and SGLang serve HTTPS, or a Unix socket instead of a port.
_NO_HTTP = ("--ssl-keyfile", "--ssl-certfile", "--uds")
# Above are the NodePorts of Kubernetes, SGLang's usual ports, and those of connections.
_PORTS = range(20_000, 30_000)


@dataclass(frozen=True, kw_only=True)
class LauncherOptions:
    """Settings of a launcher."""

    endpoint: str  # Where the engine is registered, namespace.component.endpoint.
    program: list[str]  # Words that start the engine, before its arguments.
    role: str  # agg, prefill or decode.
    kv_events: bool  # Switch the engine's events on.
    event_plane: str  # ``zmq`` from its sockets, ``nats`` over NATS.
    enable_local_indexer: bool  # With ``nats``: an index of the worker instead of a stream.
    ready_timeout_s: float  # Time that the engine gets to load.
    drain_timeout_s: float  # Time for its requests after a signal, before it gets that signal.
    stop_timeout_s: float  # Time to end after that, before it is killed.


def parse_options(
    engine: str, program: Sequence[str], argv: Sequence[str]
) -> tuple[LauncherOptions, Arguments]:
    """Split a command line into the launcher's flags and the engine's."""
    parser = console.Parser(
        prog=console.program(engine),
        description=f"Start {engine} with KV events on and register it. All other flags are "
        "passed on to the engine.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--endpoint",
        metavar="NAMESPACE.COMPONENT.ENDPOINT",
        help="endpoint under which to register the engine; default: dynamo.backend.generate, or "
        "dynamo.prefill.generate for prefill",
    )
    parser.add_argument(
        "--engine-command",
        dest="program",
        metavar="ENGINE_COMMAND",
        type=_words,
        default=shlex.join(program),
        help="command that starts the engine",
    )
    parser.add_argument(
        "--kv-events", action=argparse.BooleanOptionalAction, default=True, help="publish KV events"
    )
    parser.add_argument(
        "--event-plane",
        choices=EVENT_PLANES,
        help="how routers receive events: zmq: from the engine's sockets; nats: relayed to "
        "the server in NATS_SERVER; default: KVFLASH_EVENT_PLANE, else zmq",
    )
    parser.add_argument(
        "--enable-local-indexer",
        action="store_true",
        help="with --event-plane nats: routers request missed events from an index in this "
        "process, not from a stream",
    )
    drain = "seconds for running requests to finish before the engine gets a termination signal"
    for flag, least_s, default_s, text in (
        ("--ready-timeout", 0.001, 3600.0, "seconds for the engine to become ready"),
        ("--drain-timeout", 0.0, 30.0, f"{drain}; 0: pass it on at once"),
        ("--stop-timeout", 0.001, 60.0, "seconds to exit after the signal; then it is killed"),
    ):
        dest, parse = f"{flag[2:].replace('-', '_')}_s", bounded_float(least_s)
        parser.add_argument(
            flag, dest=dest, metavar="SECONDS", type=parse, default=default_s, help=text
        )
    roles = parser.add_mutually_exclusive_group()
    for role in ("prefill", "decode"):
        flag = f"--is-{role}-worker"
        roles.add_argument(
            flag, dest="role", action="store_const", const=role, help=f"run as a {role} worker"
        )
    roles.add_argument(
        "--disaggregation-mode", dest="role", choices=ROLES, help="the role, as one flag"
    )
    known, rest = parser.parse_known_args(list(argv))
    known.role = known.role or "agg"
    component = "prefill" if known.role == "prefill" else "backend"
    known.endpoint = known.endpoint or f"dynamo.{component}.generate"
    try:
        known.event_plane = plane_of_events(known.event_plane)
    except ConfigError as error:
        parser.error(str(error))
    return LauncherOptions(**vars(known)), Arguments([word for word in rest if word != "--"])


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

    They are not among those that Linux gives to connections: engines load for minutes before they
    listen, and a connection would not be asked to make room.
    """
    for _ in range(_ATTEMPTS):
        first = random.choice(_PORTS)
        with ExitStack() as held:
            try:
                for port in range(first, first + count):
                    held.enter_context(socket.socket()).bind(("", port))
            except OSError:
                continue
            return first
    raise ConfigError(f"no {count} free ports in a row")


def http_port(arguments: Arguments) -> int:
    """The engine's HTTP port: as given, or a free one.

    ConfigError if it would not listen for plain HTTP there: nothing would ever find it healthy.
    """
    for flag in _NO_HTTP:
        if arguments.value(flag) is not None:
            raise ConfigError(
                f"{flag}: a launched engine is reached over plain HTTP: leave the flag out, or "
                "start the engine yourself and give its URL to the frontend by --worker"
            )
    port = arguments.number("--port")
    if port is None:
        port = free_ports(1)
        arguments.add("--port", port)
    elif not 1 <= port <= 65_535:
        raise ConfigError(f"--port must be in 1..=65535, got {port}")
    return port


def api_key(arguments: Arguments, *variables: str) -> str | None:
    """The key that the engine's API asks for: as given, or from the environment."""
    given = {"--api-key": arguments.value("--api-key")}
    for name in (*variables, "KVFLASH_WORKER_API_KEY"):
        given[f"environment variable {name}"] = os.environ.get(name)
    found = (checked_key(text or "", source) for source, text in given.items())
    return next(filter(None, found), None)


def engine_events(
    options: LauncherOptions, arguments: Arguments, ranks: int, **more: object
) -> EventPorts | None:
    """Where the engine publishes: as given, or at free ports.

    ``more`` is what its config needs besides; without it the engine publishes nothing.
    """
    said = arguments.document("--kv-events-config")
    if not options.kv_events:
        return None
    if said is not None:
        missing = {name: value for name, value in more.items() if said.get(name) != value}
        if not missing:
            return EventPorts.of(said)
        if any(said.get(name) is not False for name in missing):
            logger.warning(
                "--kv-events-config lacks %s, so the engine publishes no events and its cache is "
                "not counted",
                json.dumps(missing)[1:-1],
            )
        return None
    first = free_ports(2 * ranks)
    events = EventPorts(port=first, replay_port=first + ranks)
    arguments.add("--kv-events-config", events.config(**more))
    return events
