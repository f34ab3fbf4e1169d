"""The indexer in the caller's process: HTTP service, index and event transport."""

import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any, ParamSpec

from kvflash._core import FoundWorkers, Indexer
from kvflash.errors import ConfigError, ConflictError, InvalidArgumentError
from kvflash.indexer.args import IndexerArgs
from kvflash.process import FedService
from kvflash.roster.core import Replicas
from kvflash.roster.finder import add_named, find_workers

_P = ParamSpec("_P")


def _decoded(call: Callable[_P, bytes]) -> Callable[_P, dict[str, Any]]:
    """The same call, with its JSON decoded."""

    @functools.wraps(call)
    def run(*args: _P.args, **fields: _P.kwargs) -> dict[str, Any]:
        return dict(json.loads(call(*args, **fields)))

    return run


class IndexerService(FedService):
    """The standalone indexer as an object; ``python -m kvflash.indexer`` runs one of these.

    ::

        with IndexerService(host="127.0.0.1", port=0) as indexer:
            indexer.register(1, "tcp://127.0.0.1:5557", model_name="m", block_size=16)
            indexer.query([1, 2, 3], model_name="m")["scores"]

    Several may live in one process. It handles no signals and leaves logging to the process. It can
    be started and stopped once.

    ``register``, ``unregister`` and ``query`` are POST /register, /unregister and /query without
    HTTP, with the fields as keywords; ``help(indexer.register)`` shows the manual of each.

    Args:
        args: Settings; ``parse_args`` makes them from a command line.
        **settings: Fields of ``IndexerArgs``, by name: the flags with ``_`` for ``-``.

    Raises:
        ConfigError: A flag is invalid; names the flag and the legal values.
        TypeError: The setting does not exist.
    """

    _core: Indexer

    def __init__(self, args: IndexerArgs | None = None, **settings: Any) -> None:
        args = dataclasses.replace(args or IndexerArgs(), **settings)
        self._core = Indexer(
            **args.core_settings(), peers=args.peers, test_endpoints=args.test_endpoints
        )
        for worker in args.workers:
            try:
                self._core.register(
                    worker.instance_id,
                    worker.endpoint,
                    model_name=args.model_name,
                    block_size=args.block_size or 0,
                    tenant_id=args.tenant_id,
                    dp_rank=worker.dp_rank,
                )
            except (ConflictError, InvalidArgumentError) as error:
                entry = f"{worker.instance_id}:{worker.dp_rank}={worker.endpoint}"
                raise ConfigError(f"--workers: entry {entry!r}: {error}") from None
        found = FoundWorkers(
            self._core.catalog,
            model_name=args.model_name,
            tenant_id=args.tenant_id,
            block_size=args.block_size,
            max_workers=args.max_workers,
        )
        add_named(found, args)
        replicas = Replicas()
        parts = find_workers(
            found,
            args,
            replicas=replicas,
            show_metrics=lambda _text: None,
            # They are logged.
            warnings_of=lambda _part: lambda _warnings: None,
            has_shared_ids=True,
        )
        if args.discovery_kind is not None:
            # Without discovery asyncio need not be loaded.
            from kvflash.roster.indexers import AnnouncedIndexer  # noqa: PLC0415

            where = (args.namespace, args.host, lambda: self.url)
            parts.append(AnnouncedIndexer(args.discovery_kind, *where))
        self.register, self.unregister = self._core.register, self._core.unregister
        self.query = _decoded(self._core.query)
        super().__init__(self._core, args, replicas=replicas, parts=parts)

    def is_ready(self) -> bool:
        """Whether it has recovered from a peer and has its initial workers, as GET /ready says."""
        return self._core.is_ready()
