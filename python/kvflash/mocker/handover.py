"""Hands a prompt from its prefill worker to its decode worker; only its completion is sent.

vLLM's prefill worker answers with the location of its blocks, which goes to the decode worker. With
SGLang both get a room number at once, and the decode worker waits at the other's port until the
room is done.
"""

import asyncio
import contextlib
import json
import logging
import uuid
from dataclasses import dataclass
from typing import Any

from kvflash.address import reachable, unbindable
from kvflash.errors import TransportError
from kvflash.mocker.config import Role
from kvflash.mocker.fields import Fields, integer, is_text, mapping, refuse, text

logger = logging.getLogger(__name__)

ROOMS_MAX = 65_536
MEET_TIMEOUT_S = 60.0
# A decode worker that has not asked for a computed prompt by then has died, or its client left.
FETCH_S_MAX = 5.0
_LINE_BYTES_MAX = 1_024
_DONE, _FAILED = b'{"done": true}', b'{"done": false}'
ROOM_FIELDS = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
_ROOM_MAX = (1 << 64) - 1


def parse_transfer(fields: Fields) -> Fields:
    """The field kv_transfer_params, checked; empty if missing."""
    params = mapping(fields, "kv_transfer_params")
    blocks, engine_id = params.get("remote_block_ids"), params.get("remote_engine_id")
    if params.get("do_remote_prefill") and not (is_text(engine_id) and isinstance(blocks, list)):
        refuse(
            "kv_transfer_params with do_remote_prefill need remote_engine_id and remote_block_ids",
            "kv_transfer_params",
        )
    return params


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Where a decode worker waits for a prompt, in SGLang's terms."""

    host: str
    port: int
    number: int


def parse_room(fields: Fields) -> Room | None:
    """The room of a request, or None; refuses an invalid one."""
    missing = [name for name in ROOM_FIELDS if fields.get(name) is None]
    if len(missing) == len(ROOM_FIELDS):
        return None
    if missing:
        refuse(f"{', '.join(ROOM_FIELDS)} belong together: {missing[0]} is missing", missing[0])
    return Room(
        host=text(fields, "bootstrap_host"),
        port=integer(fields, "bootstrap_port", 1, 65_535),
        number=integer(fields, "bootstrap_room", 0, _ROOM_MAX),
    )


class Handover:
    """One worker's part in transfers: what it receives or provides."""

    def __init__(self, role: Role, host: str, block_size: int) -> None:
        self._role = role
        self._host = host  # The interface at which decode workers wait.
        self._block_size = block_size
        self._engine_id = str(uuid.uuid4())
        # True: done, False: failed, an event: a worker is waiting; the oldest first, up to a limit.
        self._rooms: dict[int, bool | asyncio.Event] = {}
        self._server: asyncio.Server | None = None
        self._answers: set[asyncio.Task[Any]] = set()
        self._answered = asyncio.Event()
        self.bootstrap_port: int | None = None

    @property
    def is_prefill(self) -> bool:
        return self._role == "prefill"

    async def open(self, port: int) -> None:
        """Let decode workers wait at a port; raises ConfigError if it is taken."""
        try:
            self._server = await asyncio.start_server(
                self._answer, self._host, port, limit=_LINE_BYTES_MAX
            )
        except OSError as error:
            raise unbindable(("--host", "--bootstrap-ports"), self._host, port, error) from error
        self.bootstrap_port = port

    async def close(self, timeout_s: float) -> None:
        """Let decode workers fetch what is computed, for 5 s at most, then hang up on all."""
        if self._server is None:
            return
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._fetched(), min(timeout_s, FETCH_S_MAX))
        self._server.close()
        for answer in list(self._answers):
            answer.cancel()
        await asyncio.gather(*self._answers, return_exceptions=True)

    async def receive(self, transfer: Fields, room: Room | None) -> bool:
        """Wait until the worker that computes the prompt is done; returns whether there is one."""
        if self._role != "decode":
            return False
        if room is not None:
            await meet(room)
            return True
        return bool(transfer.get("do_remote_prefill"))

    def params(self, prompt_tokens: int) -> dict[str, Any] | None:
        """A prefill worker's transfer parameters; passed unchanged to the decode worker."""
        if not self.is_prefill:
            return None
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._engine_id,
            "remote_block_ids": list(range(-(-prompt_tokens // self._block_size))),
            "remote_host": reachable(self._host).strip("[]"),
            "remote_port": self.bootstrap_port or 0,
        }

    def finish(self, room: Room | None, *, is_done: bool) -> None:
        """Report to a room's waiters that its prompt is computed, or has failed."""
        if self._server is None or room is None:
            return
        waiting = self._rooms.pop(room.number, None)
        self._rooms[room.number] = is_done
        while len(self._rooms) > ROOMS_MAX:
            del self._rooms[next(iter(self._rooms))]
        if isinstance(waiting, asyncio.Event):
            waiting.set()

    async def _fetched(self) -> None:
        """Wait until every computed prompt has been asked for, and every answer is sent."""
        while self._is_owed():
            self._answered.clear()
            await self._answered.wait()

    def _is_owed(self) -> bool:
        """Whether a decode worker has an answer to come, other than of a prompt never computed."""
        waiting = sum(isinstance(room, asyncio.Event) for room in self._rooms.values())
        return len(self._answers) > waiting or True in self._rooms.values()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._answers.add(task)
        try:
            number = int(json.loads(await reader.readline())["room"])
            writer.write(_DONE if await self._is_computed(number) else _FAILED)
            await writer.drain()
        except (
            ValueError, KeyError, TypeError, OverflowError, RecursionError, ConnectionError,
            asyncio.TimeoutError,
        ) as error:  # fmt: skip
            logger.warning("a decode worker was refused: %r", error)
        except asyncio.CancelledError:
            # Disconnecting is the answer.
            pass
        finally:
            self._answers.discard(task)
            self._answered.set()
            writer.close()

    async def _is_computed(self, number: int) -> bool:
        """Wait until a room's prompt is computed or has failed; the room is gone then."""
        news = self._rooms.setdefault(number, asyncio.Event())
        try:
            if isinstance(news, asyncio.Event):
                await asyncio.wait_for(news.wait(), MEET_TIMEOUT_S)
        finally:
            is_computed = self._rooms.pop(number, False) is True
        return is_computed


async def meet(room: Room) -> None:
    """Wait until the prefill worker has computed a room's prompt; TransportError if it does not."""
    where = f"room {room.number} at {room.host}:{room.port}"

    async def ask() -> bytes:
        reader, writer = await asyncio.open_connection(room.host, room.port)
        try:
            writer.write(json.dumps({"room": room.number}).encode() + b"\n")
            return await reader.read(_LINE_BYTES_MAX)
        finally:
            writer.close()

    try:
        answer = await asyncio.wait_for(ask(), MEET_TIMEOUT_S)
    except (OSError, asyncio.TimeoutError) as error:
        raise TransportError(f"no prefill from {where}: {error!r}") from error
    if not answer:
        raise TransportError(f"no prefill from {where}: the prefill worker hung up")
    if answer != _DONE:
        reason = "the prefill failed" if answer == _FAILED else f"got {answer!r:.80}"
        raise TransportError(f"no prefill from {where}: {reason}")
