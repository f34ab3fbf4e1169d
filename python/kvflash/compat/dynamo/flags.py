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
    flags = ("--static-endpoint", "--router-mode", "--model-name", "--model-path")
    given, rest = _split(words, *flags)
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
    # The endpoint names the namespace, and prefill workers have a router of their own.
    given, rest = _split(_without_planes(words), "--namespace", switch="--enforce-disagg")
    for name, value in vars(given).items():
        if value:
            flag = f"--{name.replace('_', '-')}"
            _note(f"{flag} has no effect on a router of one endpoint")
    return rest


def _indexer(words: Sequence[str]) -> list[str]:
    prefix = [] if _variable(_METRICS_PREFIX) else ["--metrics-prefix", "dynamo"]
    return [*prefix, *words]


def _mocker(words: Sequence[str]) -> list[str]:
    flags = ("--zmq-kv-events-ports", "--zmq-replay-ports", "--planner-profile-data")
    given, rest = _split(
        _without_planes(words), *flags, "--extra-engine-args", switch="--durable-kv-events"
    )
    if given.extra_engine_args is not None:
        rest += _engine_flags(given.extra_engine_args)
    counts = _split(rest, "--num-workers", "--data-parallel-size", type=int, default=1)[0]
    for flag, ours, text in (
        ("--zmq-kv-events-ports", "--zmq-events-port", given.zmq_kv_events_ports),
        ("--zmq-replay-ports", "--zmq-replay-port", given.zmq_replay_ports),
    ):
        if text is not None:
            first = _first_port(flag, text, counts.num_workers, counts.data_parallel_size)
            rest += [ours, str(first)]
    if given.durable_kv_events:
        rest += ["--event-plane", "nats"]
    if given.planner_profile_data is not None:
        _note("--planner-profile-data has no effect: the mocker keeps its own model of time")
    return rest


def _split(
    words: Sequence[str], *flags: str, switch: str | None = None, **kind: Any
) -> tuple[argparse.Namespace, list[str]]:
    """The values of these flags, of this kind, and of a switch; and the other words."""
    parser = _Parser()
    for flag in flags:
        parser.add_argument(flag, **kind)
    if switch is not None:
        parser.add_argument(switch, action="store_true")
    return parser.parse_known_args(words)


def _without_planes(words: Sequence[str]) -> list[str]:
    """Set the variables of these flags, which outrank others of the same setting; the rest."""
    for flag, names, choices in (
        ("--store-kv", DISCOVERY, ("etcd", "file", "mem")),
        ("--request-plane", _REQUEST_PLANE, ("nats", "http", "tcp")),
    ):
        given, words = _split(words, flag, choices=choices, dest="value")
        if given.value is not None:
            for name in names:
                os.environ.pop(name, None)
            os.environ[names[0]] = given.value
    return list(words)


def _first_port(flag: str, text: str, workers: int, ranks: int) -> int:
    """The first of the workers' ports, which follow each other with room for their ranks."""
    try:
        ports = [int(port) for port in text.split(",")]
    except ValueError:
        raise ConfigError(f"{flag} must be ports, separated by commas, got {text!r}") from None
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
