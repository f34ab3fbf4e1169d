"""The indexer in the caller's process: HTTP service, index and event transport."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvflash._core import FoundWorkers, Indexer
from kvflash.errors import ConfigError, ConflictError, InvalidArgumentError
from kvflash.indexer.args import IndexerArgs
from kvflash.process import FedService
from kvflash.roster.core import Replicas
from kvflash.roster.finder import Finder, add_named

if TYPE_CHECKING:
    from typing_extensions import Self

    from kvflash.roster.indexers import AnnouncedIndexer


class IndexerService(FedService):
    """The standalone indexer as an object; ``python -m kvflash.indexer`` runs one of these.

    ::

        with IndexerService(host="127.0.0.1", port=0) as indexer:
            indexer.register(1, "tcp://127.0.0.1:5557", model_name="m", block_size=16)
            indexer.query([1, 2, 3], model_name="m")["scores"]

    Several may live in one process. It handles no signals and leaves logging to the process. It can
    be started and stopped once.

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
            **args.core_settings(),
            peers=args.peers,
            test_endpoints=args.test_endpoints,
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
        self._finder = Finder(
            found,
            args,
            replicas=Replicas(),
            show_metrics=lambda _text: None,
            # They are logged.
            warnings_of=lambda _part: lambda _warnings: None,
            has_shared_ids=True,
        )
        self._args = args
        self._announced: AnnouncedIndexer | None = None
        super().__init__(
            self._core,
            host=args.host,
            port=args.port,
            is_encrypted=args.tls_cert_path is not None,
        )

    def start(self) -> Self:
        """Serve HTTP and receive events in the background.

        Raises:
            ConfigError: The address can't be bound.
            ClosedError: It was started before.
        """
        super().start()
        self._finder.start()
        args, kind = self._args, self._args.discovery_kind
        if kind is not None:
            # Without discovery asyncio need not be loaded.
            from kvflash.roster.indexers import AnnouncedIndexer  # noqa: PLC0415

            self._announced = AnnouncedIndexer(kind, args.namespace, args.host, self.url)
            self._announced.start()
        return self

    def is_ready(self) -> bool:
        """Whether it has recovered from a peer and has its initial workers, as GET /ready says."""
        return self._core.is_ready()

    def stop(self) -> None:
        """Stop serving and receiving; open requests have 5 s to finish. Blocks until done."""
        if self._announced is not None:
            self._announced.stop()
        self._finder.stop()
        super().stop()

    def register(
        self,
        instance_id: int,
        endpoint: str,
        *,
        model_name: str,
        block_size: int,
        tenant_id: str = "default",
        dp_rank: int = 0,
        replay_endpoint: str | None = None,
        lora_name: str | None = None,
        additional_salt: str | None = None,
        capacity_blocks: int | None = None,
        attention_chunk_size: int | None = None,
        offload_chunk: int | None = None,
    ) -> None:
        """Register a publisher, as POST /register does.

        Args:
            instance_id: The engine's number, u64.
            endpoint: Where it publishes: ``tcp://host:port``, ``ipc://path`` or ``inproc://name``.
            model_name: The model that it serves.
            block_size: Tokens in a block, at least 1.
            tenant_id: Tenant of the model.
            dp_rank: Data parallel rank, u32.
            replay_endpoint: Where it replays; None without replay.
            lora_name: Adapter of events and queries that name no adapter.
            additional_salt: Salt of events and queries that name no salt.
            capacity_blocks: Device blocks of a rank, at least 1.
            attention_chunk_size: Tokens in a chunk of the engine's chunked local attention, at
                least 1. Without it a prefix counts only if all its chunks are held.
            offload_chunk: Tokens that the engine copies to a farther tier at once; a multiple of
                block_size. Without it, the largest number of tokens in one event of that tier.

        Raises:
            ConflictError: Already registered, or block size, adapter or salt differ from the
                index's.
            InvalidArgumentError: Block size or capacity below 1, an invalid endpoint, no model
                name, or a chunk out of range; names the field.
            OverloadedError: The limit of publishers or models is reached.
        """
        self._core.register(
            instance_id,
            endpoint,
            model_name=model_name,
            block_size=block_size,
            tenant_id=tenant_id,
            dp_rank=dp_rank,
            replay_endpoint=replay_endpoint,
            lora_name=lora_name,
            additional_salt=additional_salt,
            capacity_blocks=capacity_blocks,
            attention_chunk_size=attention_chunk_size,
            offload_chunk=offload_chunk,
        )

    def unregister(
        self,
        instance_id: int,
        *,
        model_name: str,
        tenant_id: str | None = None,
        dp_rank: int | None = None,
    ) -> None:
        """Remove an instance or one rank of it, as POST /unregister does.

        Raises:
            NotFoundError: No such registration.
        """
        self._core.unregister(
            instance_id, model_name=model_name, tenant_id=tenant_id, dp_rank=dp_rank
        )

    def query(
        self,
        token_ids: Sequence[int],
        *,
        model_name: str,
        tenant_id: str = "default",
        lora_name: str | None = None,
        lora_path: str | None = None,
        cache_salt: str | None = None,
        mm: Sequence[Mapping[str, Any]] | None = None,
        embeds: Sequence[str | bytes] | None = None,
    ) -> dict[str, Any]:
        """The answer of POST /query, without HTTP.

        Args:
            token_ids: Tokens of the prompt, u32: a list, or any contiguous buffer.
            model_name: The model.
            tenant_id: Its tenant.
            lora_name: Adapter; None = the index's, "" = none.
            lora_path: Path of the adapter as given to the engine; required where blocks are found
                by the engine's own hashes.
            cache_salt: Salt; None = the index's, "" = none.
            mm: Multimodal items, mappings with ``identifier`` (text, 1 to 1,024 bytes), ``offset``
                and ``length`` (tokens of the prompt, u32); shape [items], 65,536 at most.
            embeds: Digests of the prompt's embeddings, as bytes or in hexadecimal digits, 1 to
                1,024 bytes each; shape [blocks], 65,536 at most.

        Returns:
            ``scores`` and ``instances`` in tokens, ``frequencies`` in workers.

        Raises:
            InvalidArgumentError: A token outside u32, with its index, or an invalid item or digest,
                with index and field.
            NotFoundError: Unknown model and tenant.
        """
        answer = self._core.query(
            token_ids,
            model_name=model_name,
            tenant_id=tenant_id,
            lora_name=lora_name,
            lora_path=lora_path,
            cache_salt=cache_salt,
            mm=mm,
            embeds=embeds,
        )
        return dict(json.loads(answer))
