"""Parses as much of an engine's command line as a launcher needs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from kvflash.address import reachable
from kvflash.errors import ConfigError


def split_flag(word: str) -> tuple[str, str, str]:
    """Name of a flag, ``=``, and value; engines take ``_`` in names for ``-``."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-"), equals, value


class Arguments:
    """Flags for an engine that the launcher may read and extend."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)

    def _places(self, names: Sequence[str]) -> Iterator[tuple[slice, str | None]]:
        """The words of a flag by any of its names, and its value; None where that is missing."""
        at = 0
        while at < len(self.words):
            name, is_joined, joined = split_flag(self.words[at])
            end = at + 1
            if name in names:
                end += not is_joined
                yield (
                    slice(at, end),
                    joined if is_joined else next(iter(self.words[at + 1 : end]), None),
                )
            at = end

    def value(self, *names: str) -> str | None:
        """The last value of a flag by any of its names, as ``--flag value`` or ``--flag=value``."""
        values = [value for _, value in self._places(names)]
        if None in values:
            raise ConfigError(f"{self.words[-1]} needs a value")
        return values[-1] if values else None

    def number(self, *names: str) -> int | None:
        """The value of a flag as a number."""
        value = self.value(*names)
        try:
            return None if value is None else int(value)
        except ValueError:
            raise ConfigError(f"{names[0]} must be a number, got {value!r}") from None

    def document(self, name: str) -> dict[str, Any] | None:
        """The value of a flag as a JSON object."""
        value = self.value(name)
        if value is None:
            return None
        try:
            parsed = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"{name} must be JSON: {error}") from None
        if not isinstance(parsed, dict):
            raise ConfigError(f"{name} must be a JSON object, got {value}")
        return parsed

    def add(self, name: str, *values: object) -> None:
        """Append a flag unless it is present."""
        if not any(self._places([name])):
            self.words += [name, *map(str, values)]

    def drop(self, name: str) -> str | None:
        """Remove a flag and return its value."""
        value = self.value(name)
        for place, _ in reversed(list(self._places([name]))):
            del self.words[place]
        return value


@dataclass(frozen=True, kw_only=True)
class EventPorts:
    """Ports where rank 0 publishes; rank r uses ports r higher."""

    port: int
    replay_port: int | None  # None without replay.

    def config(self, **more: object) -> str:
        """The engine's --kv-events-config."""
        config = {
            **more,
            "publisher": "zmq",
            "topic": "kv-events",
            # With a star the engine binds; it would connect to any other host.
            "endpoint": f"tcp://*:{self.port}",
            "replay_endpoint": f"tcp://*:{self.replay_port}",
        }
        return json.dumps(config)

    @staticmethod
    def of(config: dict[str, Any]) -> EventPorts | None:
        """The ports in an engine's own config, or None; ConfigError if they can't be announced."""
        if config.get("publisher") != "zmq":
            return None
        replay = config.get("replay_endpoint")
        return EventPorts(
            port=_port("endpoint", config.get("endpoint", "tcp://*:5557")),
            replay_port=None if replay is None else _port("replay_endpoint", replay),
        )

    def endpoints(self, host: str, ranks: int) -> list[tuple[str, str | None]]:
        """Addresses of events and replay, for each rank."""
        netloc = reachable(host)
        return [
            (
                f"tcp://{netloc}:{self.port + rank}",
                None if self.replay_port is None else f"tcp://{netloc}:{self.replay_port + rank}",
            )
            for rank in range(ranks)
        ]


@dataclass(frozen=True, kw_only=True)
class EngineCommand:
    """How to start an engine, and its properties known before it answers."""

    engine: str
    words: list[str]  # Program and arguments.
    port: int  # Its HTTP port.
    model_path: str  # A folder or a name.
    details: str  # Path of its HTTP server with the sizes of its cache.
    host: str | None = None  # Interface of its HTTP server; None if not given.
    events: EventPorts | None = None  # Where it publishes; None without events.
    block_size: int | None = None  # Tokens in a block, if given.
    ranks: int = 1  # Number of data-parallel ranks.
    context_ranks: int = 1  # Number of ranks that divide the context of each request.
    bootstrap_port: int | None = None  # Where decode workers meet an SGLang prefill worker.
    api_key: str | None = field(default=None, repr=False)  # That its API asks for; None without.

    def event_block_size(self, reported: int | None) -> int | None:
        """Tokens in a block of its events, if it reports ``reported`` in its metrics.

        vLLM multiplies its block size by the ranks that divide the context.
        """
        own = self.block_size or reported
        return None if own is None else own * self.context_ranks


def _port(field_name: str, endpoint: object) -> int:
    try:
        port = urlsplit(str(endpoint)).port if str(endpoint).startswith("tcp://") else None
    except ValueError:
        port = None
    if port is None:
        raise ConfigError(
            f"--kv-events-config: {field_name} must be tcp://*:PORT to be announced, "
            f"got {endpoint!r}"
        )
    return port
