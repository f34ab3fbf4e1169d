"""The router in the caller's process: HTTP service, index and event transport."""

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from kvflash._core import Decider, Router
from kvflash.discovery import open_discovery
from kvflash.discovery.opening import discovery_kind
from kvflash.errors import ConfigError, KvflashError
from kvflash.policy import Policy, asked_of
from kvflash.process import FedService
from kvflash.router.args import RouterArgs, parse_endpoint
from kvflash.routing.cluster import Cluster

if TYPE_CHECKING:
    from kvflash.background import Background


class RouterService(FedService):
    """The standalone router as an object; ``python -m kvflash.router`` runs one of these.

    With an ``endpoint`` it finds its workers through discovery, and also routes requests on the
    request plane. Several may live in one process. It handles no signals and leaves logging to the
    process. It can be started and stopped once.

    Args:
        args: Settings; ``parse_args`` makes them from a command line.
        policy: Replaces ``router_mode``.
        **settings: Fields of ``RouterArgs``, by name.

    Raises:
        ConfigError: A flag is invalid; names the flag and the legal values.
        TypeError: The setting does not exist.
    """

    _core: Router

    def __init__(
        self, args: RouterArgs | None = None, *, policy: Policy | None = None, **settings: Any
    ) -> None:
        args = dataclasses.replace(args or RouterArgs(), **settings)
        self._policy = asked_of(args.router_mode if policy is None else policy)
        self._core = Router(
            **args.core_settings(), policy_desk=None if self._policy is None else self._policy.desk
        )
        if self._policy is not None:
            self._policy.start()
        taken = {worker["worker_id"] for worker in args.workers}
        unused = (number for number in range(1, 2**16) if number not in taken)
        for worker in args.workers:
            body = {**worker, "model_name": args.model_name, "tenant_id": args.tenant_id}
            if body["worker_id"] is None:
                body["worker_id"] = next(unused)
            try:
                self.add_worker(body)
            except KvflashError as error:
                raise ConfigError(f"--worker {body['url']}: {error}") from None
        self._cluster = Cluster(
            self._core,
            args,
            open_discovery=open_discovery,
            show_metrics=self._core.set_more_metrics,
            is_strict=True,
        )
        parts: list[Background] = []
        if args.router_replica_sync and args.endpoint is None:
            from kvflash.router.registered import RegisteredWorkers  # noqa: PLC0415

            parts.append(RegisteredWorkers(self._core, self._cluster))
        namespace = None if args.endpoint is None else parse_endpoint(args.endpoint)[0]
        if args.finds_indexer:
            # Without discovery asyncio need not be loaded, here and below.
            from kvflash.roster.indexers import IndexerFinder  # noqa: PLC0415

            show = self._core.set_remote_indexer
            parts.append(IndexerFinder(discovery_kind(), namespace, show))
        #: Whether a decision may wait for a remote indexer or a policy in Python.
        self.is_slow = args.use_remote_indexer is not None or self._policy is not None
        if args.endpoint is not None:
            from kvflash.router.endpoint import EndpointRouter  # noqa: PLC0415

            parts.append(EndpointRouter(self, self._core, self._cluster, args))
        if args.serve_indexer and namespace is not None:
            from kvflash.roster.indexers import AnnouncedIndexer  # noqa: PLC0415

            where = (namespace, args.host, lambda: self.url)
            parts.append(AnnouncedIndexer(discovery_kind(), *where))
        super().__init__(self._core, args, replicas=self._cluster, parts=parts)

    @property
    def decider(self) -> Decider:
        """Books requests in this process, for the caller's event loop."""
        return self._core.decider

    def stop(self) -> None:
        """Stop serving and receiving; open calls may use the drain time. Blocks until done."""
        super().stop()
        if self._policy is not None:
            self._policy.close()

    def add_worker(self, worker: dict[str, Any]) -> dict[str, Any]:
        """Register a worker like POST /workers; returns its entry of GET /workers.

        Raises:
            ConflictError: Already registered, or the block size differs from the model's.
            InvalidArgumentError: An invalid field; names it.
            OverloadedError: The limit of workers or models is reached.
        """
        return dict(self.call("POST", "/workers", worker))

    def remove_worker(self, worker_id: int) -> None:
        """Remove a worker, its blocks and its requests.

        Raises:
            NotFoundError: It is not registered.
        """
        self.call("DELETE", f"/workers/{worker_id}")

    def set_worker_state(self, worker_id: int, state: str) -> None:
        """Set whether a worker takes new requests: ``active`` or ``draining``.

        Raises:
            InvalidArgumentError: An unknown state.
            NotFoundError: It is not registered.
        """
        self.call("PATCH", f"/workers/{worker_id}", {"state": state})

    def set_warnings(self, warnings: list[str]) -> None:
        """Set warnings that ``/health`` shows besides its own; replaces those set before."""
        self._core.set_warnings(warnings)

    def stats(self) -> dict[str, dict[str, int]]:
        """Counters of the state received over NATS, by namespace.component."""
        return self._cluster.stats()

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Call a route without HTTP; returns the response's JSON.

        Raises:
            InvalidArgumentError, NotFoundError, ConflictError, OverloadedError, NoWorkerError,
                AllBusyError: For the HTTP statuses 400, 404, 409, 429 and 503.
        """
        sent = b"" if body is None else json.dumps(body).encode()
        return json.loads(self._core.call(method, path, sent))
