"""Indexers in discovery: they announce themselves, and routers without a URL find them.

::

    v1/indexers/number      {"url": "http://host:port", "namespace": "ns" or null}
"""

import asyncio
import json
import logging
from collections.abc import Callable

from kvflash.address import reachable
from kvflash.background import Background
from kvflash.discovery import Delete, Put, open_discovery
from kvflash.errors import KvflashError
from kvflash.runtime import DistributedRuntime

logger = logging.getLogger(__name__)

PREFIX = "v1/indexers/"
PAUSE_S = 2.0


class AnnouncedIndexer(Background):
    """Announces a process that answers an indexer's questions, while it lives.

    It follows workers of this namespace (None: of all), listens on ``host``, and has the URL that
    ``url`` returns on this machine.
    """

    def __init__(self, kind: str, namespace: str | None, host: str, url: Callable[[], str]) -> None:
        self._kind, self._namespace, self._host, self._own_url = kind, namespace, host, url
        super().__init__("kvflash-announce", self._announce)

    async def _announce(self) -> None:
        while True:
            try:
                async with DistributedRuntime(self._kind) as runtime:
                    value = {"url": self._url(runtime.host)}
                    key = f"{PREFIX}{runtime.instance_id}"
                    await runtime.announce(key, {**value, "namespace": self._namespace})
                    logger.info("announced in discovery as %s", value["url"])
                    await runtime.wait_for_shutdown()
            except (KvflashError, OSError) as error:
                logger.warning("not announced in discovery: %s; trying again", error)
            await asyncio.sleep(PAUSE_S)

    def _url(self, reached_at: str) -> str:
        url = self._own_url()
        scheme, port = url.partition(":")[0], url.rpartition(":")[2]
        return f"{scheme}://{reachable(self._host, reached_at)}:{port}"


class IndexerFinder(Background):
    """Gives a router its indexer: the first one in discovery that follows its workers.

    The router keeps it until it is gone. ``show`` takes its URL, or None without an indexer. A
    ConfigError says why discovery can't be used.
    """

    def __init__(
        self, kind: str, namespace: str | None, show: Callable[[str | None], None]
    ) -> None:
        self._discovery = open_discovery(kind)
        self._namespace, self._show = namespace, show
        self._urls: dict[str, str] = {}
        self._used: str | None = None
        super().__init__("kvflash-indexers", self._find)

    async def _find(self) -> None:
        try:
            async with self._discovery.watch(PREFIX) as watch:
                async for event in watch:
                    if isinstance(event, Put):
                        if (url := self._read(event.key, event.value)) is not None:
                            self._urls[event.key] = url
                    elif isinstance(event, Delete):
                        self._urls.pop(event.key, None)
                    self._settle()
        finally:
            await self._discovery.close()

    def _read(self, key: str, value: bytes) -> str | None:
        try:
            fields = json.loads(value)
            url, namespace = str(fields["url"]), fields.get("namespace")
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            logger.error("discovery key %s: %r", key, error)
            return None
        return url if namespace in (None, self._namespace) else None

    def _settle(self) -> None:
        """Keep the indexer, or take the first one that can be used."""
        while self._used not in self._urls:
            before, self._used = self._used, min(self._urls, default=None)
            if self._used is None:
                if before is not None:
                    logger.warning(
                        "discovery no longer has an indexer: requests are routed by load"
                    )
                    self._show(None)
                return
            url = self._urls[self._used]
            try:
                self._show(url)
            except KvflashError as error:
                logger.error("the indexer at %s in discovery can't be used: %s", url, error)
                del self._urls[self._used]
            else:
                logger.info("using the indexer at %s", url)
