"""Follows workers' load reports."""

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, closing
from typing import Any

from kvflash.background import cancel
from kvflash.errors import KvflashError
from kvflash.runtime.frame import Request, unpack
from kvflash.runtime.plane import FailedError, PlaneClients

logger = logging.getLogger(__name__)

# Pauses between two attempts to reach a worker: the first, and the longest.
PAUSE_S, PAUSE_S_MAX = 0.5, 10.0


class LoadReader:
    """Follows the load streams of workers, and passes on each report's JSON, in one event loop."""

    def __init__(self, report: Callable[[str], None], clients: PlaneClients) -> None:
        self._report, self._clients = report, clients
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}

    def follow(self, endpoint: str, instance_id: int, transport: dict[str, Any]) -> None:
        """Read an endpoint's load reports until :meth:`forget`."""
        self.forget(endpoint, instance_id)
        work = self._read_for_ever(endpoint, instance_id, transport)
        self._tasks[endpoint, instance_id] = asyncio.get_running_loop().create_task(work)

    def forget(self, endpoint: str, instance_id: int) -> None:
        """Stop reading an endpoint that is gone."""
        task = self._tasks.pop((endpoint, instance_id), None)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        """Stop reading."""
        await cancel(self._tasks.values())

    async def _read_for_ever(
        self, endpoint: str, instance_id: int, transport: dict[str, Any]
    ) -> None:
        pause_s = PAUSE_S
        while True:
            try:
                async with aclosing(self._reports(endpoint, instance_id, transport)) as reports:
                    async for report in reports:
                        # Refused before the worker's card is known; then the stream is reopened.
                        self._report(report)
                        pause_s = PAUSE_S
            except (KvflashError, FailedError, OSError, LookupError, TypeError) as error:
                # A TypeError is an item that JSON can't hold.
                logger.debug("load of worker %d: %s", instance_id, error)
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, PAUSE_S_MAX)

    async def _reports(
        self, endpoint: str, instance_id: int, transport: dict[str, Any]
    ) -> AsyncGenerator[str, None]:
        request = Request(secrets.token_hex(8), endpoint, instance_id, {})
        with closing(await self._clients.of(transport).ask(transport, request)) as reply:
            while (item := await reply.receive()) is not None:
                fields = unpack(item)
                if isinstance(fields, dict):
                    yield json.dumps({**fields, "id": instance_id})
