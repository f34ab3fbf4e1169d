"""Frames of the request planes: 4 bytes length of the rest (big-endian), 1 byte kind, payload.

The payload is msgpack. A client sends a Request; a server answers with one Data frame per item,
then one End or Error.
"""

from __future__ import annotations

import struct
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any

import msgpack  # type: ignore[import-untyped]

from kvflash.errors import (
    ClosedError,
    DeadlineError,
    DecodeError,
    DrainingError,
    InvalidArgumentError,
    KvflashError,
    NotFoundError,
    NoWorkerError,
    OverloadedError,
    TransportError,
    WorkerError,
)

FRAME_BYTES_MAX = 32 * 1024 * 1024
MESSAGE_CHARS_MAX = 4_096
_HEAD = struct.Struct(">IB")
HEAD_BYTES = _HEAD.size


class Kind(IntEnum):
    """Kind of a frame."""

    REQUEST = 1
    DATA = 2
    END = 3
    ERROR = 4
    PING = 5
    PONG = 6


@dataclass(frozen=True)
class Request:
    """A client's request."""

    id: str
    endpoint: str
    instance_id: int
    payload: Any
    #: Time limit, counted from the request's arrival.
    deadline_ms: int | None = None

    def pack(self, bytes_max: int) -> bytes:
        """Encode the frame; InvalidArgumentError if msgpack can't, or it exceeds bytes_max."""
        fields = {k: getattr(self, k) for k in ("id", "endpoint", "instance_id", "payload")}
        if self.deadline_ms is not None:
            fields["deadline_ms"] = self.deadline_ms
        return frame(Kind.REQUEST, pack(fields, "request"), bytes_max, "request")

    @classmethod
    def parse(cls, fields: Any) -> Request:
        """Check the fields of a request; a wrong or missing one is an InvalidArgumentError."""
        if not isinstance(fields, dict):
            raise InvalidArgumentError(f"request must be a map, got {type(fields).__name__}")
        deadline_ms = fields.get("deadline_ms")
        for name, kind in _FIELDS.items():
            value = fields.get(name)
            if name == "deadline_ms" and value is None:
                continue
            if not isinstance(value, kind) or isinstance(value, bool):
                raise InvalidArgumentError(f"{name} must be of type {kind.__name__}, got {value!r}")
        if deadline_ms is not None and deadline_ms <= 0:
            raise InvalidArgumentError(f"deadline_ms must be at least 1, got {deadline_ms}")
        if "payload" not in fields:
            raise InvalidArgumentError("payload is missing")
        return cls(
            fields["id"], fields["endpoint"], fields["instance_id"], fields["payload"], deadline_ms
        )


# Codes of errors; the first matching class wins. Any other error is the handler's own.
_CODES: dict[str, type[KvflashError]] = {
    "overloaded": OverloadedError,
    "not_found": NotFoundError,
    "no_worker": NoWorkerError,
    "draining": ClosedError,
    "deadline": DeadlineError,
    "invalid": InvalidArgumentError,
    "unreachable": TransportError,
}
_FIELDS = {"id": str, "endpoint": str, "instance_id": int, "deadline_ms": int}


#: Why a request is refused before its handler sees it.
REFUSALS = (InvalidArgumentError, DecodeError, NotFoundError, ClosedError, OverloadedError)


@dataclass(frozen=True)
class Failure:
    """Content of an Error frame."""

    code: str
    message: str
    #: The handler never saw the request, so another instance may be tried.
    retry: bool = False

    @classmethod
    def of(cls, error: BaseException, *, retry: bool = False) -> Failure:
        """Convert an exception for the client."""
        if isinstance(error, WorkerError):
            return cls(error.code, error.message, retry)
        for code, kind in _CODES.items():
            if isinstance(error, kind):
                return cls(code, str(error), retry)
        return cls("internal", f"{type(error).__name__}: {error}", retry)

    @classmethod
    def refusing(cls, error: KvflashError) -> Failure:
        """One of REFUSALS; a malformed request would be refused by any instance."""
        if isinstance(error, InvalidArgumentError | DecodeError):
            return cls("invalid", str(error))
        return cls.of(error, retry=True)

    def pack(self) -> bytes:
        short = Failure(self.code, self.message[:MESSAGE_CHARS_MAX], self.retry)
        return frame(Kind.ERROR, msgpack.packb(asdict(short), unicode_errors="replace"))

    @classmethod
    def parse(cls, fields: Any) -> Failure:
        """Read an Error frame; missing fields do not hide the error."""
        if not isinstance(fields, dict):
            return cls("internal", str(fields))
        return cls(
            str(fields.get("code", "internal")),
            str(fields.get("message", "")),
            fields.get("retry") is True,
        )

    def error(self) -> KvflashError:
        """The exception that the client raises."""
        if self.code == "draining" and self.retry:
            return DrainingError(self.message)
        kind = _CODES.get(self.code)
        return WorkerError(self.code, self.message) if kind is None else kind(self.message)


def pack(value: Any, what: str) -> bytes:
    """Encode as msgpack; a type or number that msgpack lacks is an InvalidArgumentError."""
    try:
        packed: bytes = msgpack.packb(value, default=_plain)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgumentError(f"{what} can't be written as msgpack: {error}") from error
    return packed


def unpack(payload: bytes | memoryview) -> Any:
    """Decode a payload; DecodeError if it is not msgpack."""
    try:
        return msgpack.unpackb(payload, strict_map_key=False)
    except (ValueError, msgpack.UnpackException) as error:
        raise DecodeError(f"payload is not msgpack: {error}") from error
    except TypeError as error:
        # Python reads a tuple that was a key as a list, which can't be one.
        raise DecodeError(f"payload has a key of a map that can't be one: {error}") from error


def _plain(value: Any) -> Any:
    """Convert numpy arrays and numbers, sets and models to plain data."""
    for method in ("tolist", "model_dump"):
        if hasattr(value, method):
            return getattr(value, method)()
    if isinstance(value, set | frozenset):
        return list(value)
    raise TypeError(f"can't serialize {type(value).__name__}")


def frame(
    kind: Kind, payload: bytes = b"", bytes_max: int = FRAME_BYTES_MAX, what: str = "frame"
) -> bytes:
    """Encode a frame; one that is larger than bytes_max is an InvalidArgumentError."""
    size = len(payload) + 1
    if size > bytes_max:
        raise InvalidArgumentError(f"{what} may have at most {bytes_max} bytes, got {size}")
    return _HEAD.pack(size, kind) + payload


class FrameReader:
    """Cuts a stream of bytes into frames.

    Bytes that are no frame are a DecodeError; so is a too large one, before its bytes are buffered.
    """

    def __init__(self, bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._buffer = bytearray()

    @property
    def waiting_bytes(self) -> int:
        """Bytes of a frame that is incomplete."""
        return len(self._buffer)

    def feed(self, data: bytes | bytearray | memoryview) -> list[tuple[int, bytes]]:
        """Take bytes; return the frames that they complete, as (kind, payload)."""
        buffer = self._buffer
        buffer += data
        frames, start = [], 0
        while len(buffer) - start >= HEAD_BYTES:
            size, kind = _HEAD.unpack_from(buffer, start)
            if size > self._bytes_max:
                raise DecodeError(f"frame may have at most {self._bytes_max} bytes, got {size}")
            if size == 0:
                raise DecodeError("frame has no kind: its length is 0")
            end = start + 4 + size
            if len(buffer) < end:
                break
            frames.append((kind, bytes(buffer[start + HEAD_BYTES : end])))
            start = end
        del buffer[:start]
        return frames
