"""Reads an engine's events in Python, for tools and tests. Routers use a faster path."""

import json
from typing import Any

import msgpack  # type: ignore[import-untyped,unused-ignore]
import zmq
import zmq.asyncio

from kvflash._core import compute_block_hash_for_seq
from kvflash.errors import InvalidArgumentError
from kvflash.runtime.arguments import check_range
from kvflash.transport.zmq_socket import dial, subscribe

_EVENTS_MAX = 4_096
_U64 = (1 << 64) - 1
_STORED = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
_LATER = ("lora_name",)


class ZmqKvEventListener:
    """Subscribes to an engine and returns its events as JSON for `RadixTree.apply_event`.

    Events from before it connected, or that it is too slow to read, are lost; nothing is replayed.
    Extra keys are ignored: vLLM's blocks with a salt or multimodal items are reported as blocks of
    plain tokens.
    """

    def __init__(self, zmq_endpoint: str, zmq_topic: str, kv_block_size: int) -> None:
        """Connect.

        Args:
            zmq_endpoint: Where the engine publishes.
            zmq_topic: Topic to subscribe to; "" means all.
            kv_block_size: Tokens in a block, at least 1; blocks of another size are skipped.

        Raises:
            InvalidArgumentError: The block size is below 1, or the endpoint is invalid.
        """
        self._block_size = check_range("kv_block_size", kv_block_size, 1, (1 << 32) - 1)
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.SUB)
        subscribe(self._socket, topic=zmq_topic.encode())
        try:
            dial(self._socket, zmq_endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise InvalidArgumentError(
                f"zmq_endpoint must look like tcp://host:port, got {zmq_endpoint!r}: {error}"
            ) from error

    async def get_events(self) -> list[str]:
        """Return the events received so far; waits for at least one batch.

        Returns:
            JSON strings: ``{"event_id", "dp_rank", "data": {"stored": ...} | {"removed": ...} |
                "cleared"}``. At most about 4,096; the next call returns the rest.
        """
        events = self._events(await self._socket.recv_multipart())
        while len(events) < _EVENTS_MAX and await self._socket.poll(0):
            events += self._events(await self._socket.recv_multipart())
        return events

    def close(self) -> None:
        """Disconnect."""
        self._context.destroy(0)

    def _events(self, frames: list[bytes]) -> list[str]:
        try:
            number = int.from_bytes(frames[-2], "big")
            batch = msgpack.unpackb(frames[-1], strict_map_key=False)
            rank = batch[2] if len(batch) > 2 else None
            told = [self._data(_fields(event)) for event in batch[1]]
        except (ValueError, TypeError, LookupError, msgpack.UnpackException):
            # Not an event batch.
            return []
        return [
            json.dumps({"event_id": number, "dp_rank": rank or 0, "data": data})
            for data in told
            if data is not None
        ]

    def _data(self, event: dict[str, Any]) -> Any:
        kind = event["type"]
        if kind == "AllBlocksCleared":
            return "cleared"
        names = [_name(name) for name in event.get("block_hashes") or []]
        if kind == "BlockRemoved":
            return {"removed": {"block_hashes": names}}
        if kind != "BlockStored" or event.get("block_size") != self._block_size:
            return None
        hashes = compute_block_hash_for_seq(
            event["token_ids"],
            self._block_size,
            lora_name=event.get("lora_name"),
            cache_salt=event.get("cache_salt"),
        )
        if len(hashes) != len(names):
            return None
        parent = event.get("parent_block_hash")
        return {
            "stored": {
                "parent_hash": None if parent is None else _name(parent),
                "blocks": [
                    {"block_hash": name, "tokens_hash": tokens}
                    for name, tokens in zip(names, hashes, strict=True)
                ],
            }
        }


def _fields(event: Any) -> dict[str, Any]:
    """An event as a mapping of field names, from either encoding."""
    if isinstance(event, dict):
        return event
    names = ("block_hashes", "medium") if event[0] == "BlockRemoved" else _STORED + _LATER
    return {"type": event[0], **dict(zip(names, event[1:], strict=False))}


def _name(value: Any) -> int:
    """A block's name as 64 bits; of bytes the last eight count."""
    return int.from_bytes(value[-8:], "big") if isinstance(value, bytes) else int(value) & _U64
