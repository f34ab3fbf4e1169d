"""Small messages to all members of a group, over NATS Core."""

import contextlib
from collections.abc import Callable
from typing import Any

import nats.errors

from kvflash.nats_login import Client, reaching


class NatsChannel:
    """A group's subject; closes its connection at the end. See :class:`.channel.Channel`."""

    endpoint: str | None = None

    def __init__(self, client: Client, subject: str) -> None:
        self._client, self._subject = client, subject

    async def open(self, on_message: Callable[[bytes], None]) -> None:

        async def hear(message: Any) -> None:
            on_message(message.data)

        async with reaching(f"subject {self._subject}"):
            await self._client.subscribe(self._subject, cb=hear)
            await self._client.flush()

    async def send(self, data: bytes) -> None:
        async with reaching(f"subject {self._subject}"):
            await self._client.publish(self._subject, data)

    def follow(self, endpoints: set[str]) -> None:
        """No effect, since the server knows the members."""

    async def close(self) -> None:
        with contextlib.suppress(nats.errors.Error, OSError):
            await self._client.close()
