"""Flags of Dynamo's commands, as flags and variables of kvflash's."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from kvflash.discovery.opening import VARIABLES as DISCOVERY
from kvflash.errors import ConfigError

_MODE = ("KVFLASH_ROUTER_MODE", "DYN_ROUTER_MODE")
_METRICS_PREFIX = ("KVFLASH_METRICS_PREFIX", "DYN_METRICS_PREFIX")
_REQUEST_PLANE = ("KVFLASH_REQUEST_PLANE", "DYN_REQUEST_PLANE")
#: Modes that need to know nothing of the workers' caches and load.
_STATIC_MODES = ("round-robin", "random")
#: Keys of a file for ``--extra-engine-args`` that have another name as a flag.
_ENGINE_KEYS = {
    "dp_size": "data-parallel-size",
    "is_prefill": "is-prefill-worker",
    "is_decode": "is-decode-worker",
}


class _Parser(argparse.ArgumentParser):
    def __init__(self) -> None:
        super().__init__(add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def translate(command: str, words: Sequence[str]) -> list[str]:
    """Convert the arguments of ``dynamo.COMMAND`` to those of ``kvflash COMMAND``.

    Flags that kvflash sets by variables change this process's environment; a ConfigError says why
    a flag can't be followed.
    """
    convert = _CONVERTERS.get(command)
    return list(words) if convert is None else convert(words)


def _frontend(words: Sequence[str]) -> list[str]:
    parser = _Parser()
    for flag in ("--static-endpoint", "--router-mode", "--model-name", "--model-path"):
        parser.add_argument(flag)
    given, rest = parser.parse_known_args(words)
    if given.static_endpoint is None:
        return list(words)
    parts = given.static_endpoint.split(".")
    if len(parts) != 3 or not all(parts):
        raise ConfigError(
            f"--static-endpoint must be namespace.component.endpoint, got {given.static_endpoint!r}"
        )
    mode = given.router_mode or _variable(_MODE) or "round-robin"
    if mode not in _STATIC_MODES:
        raise ConfigError(
            f"--static-endpoint excludes --router-mode {mode}, which follows each worker's cache "
            f"and load: take {' or '.join(_STATIC_MODES)}, or leave --static-endpoint out"
        )
    _note("--static-endpoint: workers of its namespace are found through discovery")
    return ["--namespace", parts[0], "--router-mode", mode, *rest]


def _router(words: Sequence[str]) -> list[str]:
    parser = _Parser()
    _add_planes(parser)
    # The endpoint names the namespace, and prefill workers have a router of their own.
    parser.add_argument("--namespace")
    parser.add_argument("--enforce-disagg", action="store_true")
    given, rest = parser.parse_known_args(words)
    _set_planes(given)
    for flag, value in (
        ("--namespace", given.namespace),
        ("--enforce-disagg", given.enforce_disagg),
    ):
        if value:
            _note(f"{flag} has no effect on a router of one endpoint")
    return rest


def _indexer(words: Sequence[str]) -> list[str]:
    prefix = [] if _variable(_METRICS_PREFIX) else ["--metrics-prefix", "dynamo"]
    return [*prefix, *words]


def _mocker(words: Sequence[str]) -> list[str]:
    parser = _Parser()
    _add_planes(parser)
    for flag in ("--zmq-kv-events-ports", "--zmq-replay-ports", "--planner-profile-data"):
        parser.add_argument(flag)
    parser.add_argument("--extra-engine-args")
    parser.add_argument("--durable-kv-events", action="store_true")
    given, rest = parser.parse_known_args(words)
    _set_planes(given)
    if given.extra_engine_args is not None:
        rest += _engine_flags(given.extra_engine_args)
    counting = _Parser()
    for flag in ("--num-workers", "--data-parallel-size"):
        counting.add_argument(flag, type=int, default=1)
    counted = counting.parse_known_args(rest)[0]
    for flag, ours, text in (
        ("--zmq-kv-events-ports", "--zmq-events-port", given.zmq_kv_events_ports),
        ("--zmq-replay-ports", "--zmq-replay-port", given.zmq_replay_ports),
    ):
        if text is not None:
            first = _first_port(flag, text, counted.num_workers, counted.data_parallel_size)
            rest += [ours, str(first)]
    if given.durable_kv_events:
        rest += ["--event-plane", "nats"]
    if given.planner_profile_data is not None:
        _note("--planner-profile-data has no effect: the mocker keeps its own model of time")
    return rest


def _add_planes(parser: _Parser) -> None:
    parser.add_argument("--store-kv", choices=("etcd", "file", "mem"))
    parser.add_argument("--request-plane", choices=("nats", "http", "tcp"))


def _set_planes(given: argparse.Namespace) -> None:
    """Set the variables of these flags; the others of the same setting are outranked."""
    for names, value in ((DISCOVERY, given.store_kv), (_REQUEST_PLANE, given.request_plane)):
        if value is not None:
            for name in names:
                os.environ.pop(name, None)
            os.environ[names[0]] = value


def _first_port(flag: str, text: str, workers: int, ranks: int) -> int:
    """The first of the workers' ports, which follow each other with room for their ranks."""
    try:
        ports = [int(port) for port in text.split(",")]
    except ValueError:
        raise ConfigError(f"{flag} must be ports with commas, got {text!r}") from None
    if len(ports) != workers:
        raise ConfigError(
            f"{flag} must have one port for each of {workers} workers (--num-workers), got {text!r}"
        )
    if ports != [ports[0] + ranks * worker for worker in range(workers)]:
        raise ConfigError(
            f"{flag} must be ports {ranks} apart (--data-parallel-size), got {text!r}: start one "
            "mocker for each other port"
        )
    return ports[0]


def _engine_flags(path: str) -> list[str]:
    """The flags of a JSON file with the engine's settings; they outrank the command line."""
    try:
        settings = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--extra-engine-args must be a JSON file; {path}: {error}") from None
    if not isinstance(settings, Mapping):
        raise ConfigError(f"--extra-engine-args: {path} must contain a JSON object")
    flags = []
    for key, value in settings.items():
        name = _ENGINE_KEYS.get(key, key.replace("_", "-"))
        flags += _flag_of(name, value)
    return flags


def _flag_of(name: str, value: Any) -> list[str]:
    if value is None or (value is False and name.startswith("is-")):
        return []
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}", str(value)]


def _variable(names: Sequence[str]) -> str | None:
    return next((os.environ[name] for name in names if os.environ.get(name)), None)


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


_CONVERTERS: dict[str, Callable[[Sequence[str]], list[str]]] = {
    "frontend": _frontend,
    "indexer": _indexer,
    "mocker": _mocker,
    "router": _router,
}
