"""The router in a process of the caller's own: HTTP service, index and event transport."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from kvflash._core import Decider, Router
from kvflash.discovery import open_discovery
from kvflash.discovery.opening import discovery_kind
from kvflash.errors import ConfigError, KvflashError
from kvflash.policy import PREFIX, AskedPolicy, Policy, load
from kvflash.process import FedService
from kvflash.roster.indexers import IndexerFinder
from kvflash.router.args import RouterArgs, WorkerSpec, parse_endpoint
from kvflash.router.endpoint import EndpointThread
from kvflash.router.registered import RegisteredWorkers
from kvflash.routing.cluster import Cluster

__all__ = ["RouterService"]


class RouterService:
    """The standalone router as an object; ``python -m kvflash.router`` is one of these.

    With an ``endpoint`` its workers are found through discovery, and requests are routed on the
    request plane as well. Several may live in one process. It takes no signals, and leaves the
    set-up of logging to the process. It starts once and stops once.

    Args:
        args: Settings; those of a command line come from ``parse_args``.
        policy: Chooses instead of ``router_mode``.
        **settings: Fields of ``RouterArgs``, by name.

    Raises:
        ConfigError: Names the flag that can't work, and what is legal.
        TypeError: There is no such setting.
    """

    def __init__(
        self, args: RouterArgs | None = None, *, policy: Policy | None = None, **settings: Any
    ) -> None:
        args = dataclasses.replace(args or RouterArgs(), **settings)
        name = None
        if policy is None and args.router_mode is not None and args.router_mode.startswith(PREFIX):
            policy, name = load(args.router_mode), args.router_mode
        self._policy = None if policy is None else AskedPolicy(policy, name)
        self._core = Router(
            **args.core_settings(),
            policy_desk=None if self._policy is None else self._policy.desk,
        )
        for worker in _numbered(args.workers):
            try:
                self.add_worker(_registration(worker, args.model_name, args.tenant_id))
            except KvflashError as error:
                raise ConfigError(f"--worker {worker.url}: {error}") from None
        self._registered: RegisteredWorkers | None = None
        self._cluster = Cluster(
            self._core.catalog,
            self._core.bookings,
            args,
            open_discovery=open_discovery,
            show_metrics=self._core.set_more_metrics,
            is_strict=True,
        )
        if args.router_replica_sync and args.endpoint is None:
            self._registered = RegisteredWorkers(self._core, self._cluster)
        self._indexers: IndexerFinder | None = None
        if args.finds_indexer:
            namespace = None if args.endpoint is None else parse_endpoint(args.endpoint)[0]
            self._indexers = IndexerFinder(
                discovery_kind(), namespace, self._core.set_remote_indexer
            )
        self._service = FedService(
            self._core,
            host=args.host,
            port=args.port,
            make_receiver=self._cluster.make_receiver,
            is_encrypted=args.tls_cert_path is not None,
        )
        #: Time for which a request waits for a worker with room, seconds.
        self.queue_timeout_s = args.router_queue_timeout
        #: Whether a decision may wait for somebody else: a remote indexer, or a policy in Python.
        self.is_slow = args.use_remote_indexer is not None or self._policy is not None
        self._endpoint: EndpointThread | None = None
        if args.endpoint is not None:
            self._endpoint = EndpointThread(
                self, args.endpoint, model_name=args.model_name, cluster=self._cluster
            )

    @property
    def port(self) -> int:
        """The bound port.

        Raises:
            ClosedError: Not started yet.
        """
        return self._service.port

    @property
    def url(self) -> str:
        """Where it is reached from this machine.

        Raises:
            ClosedError: Not started yet.
        """
        return self._service.url

    @property
    def decider(self) -> Decider:
        """What books requests in this process, for an event loop of the caller's."""
        return self._core.decider

    def start(self) -> RouterService:
        """Serve HTTP and receive events in the background.

        Raises:
            ConfigError: The address can't be bound, or NATS refuses the login.
            TransportError: NATS is needed and does not answer; says what to start.
            ClosedError: It was started before.
        """
        self._cluster.check()
        self._service.start()
        self._cluster.start()
        if self._registered is not None:
            self._registered.start()
        if self._indexers is not None:
            self._indexers.start()
        if self._endpoint is not None:
            self._endpoint.start()
        return self

    def stop(self) -> None:
        """Stop serving and receiving; open calls get the drain time. Blocks until done."""
        if self._endpoint is not None:
            self._endpoint.stop()
        if self._indexers is not None:
            self._indexers.stop()
        if self._registered is not None:
            self._registered.stop()
        self._service.stop()
        self._cluster.stop()
        if self._policy is not None:
            self._policy.close()

    def __enter__(self) -> RouterService:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def add_worker(self, worker: dict[str, Any]) -> dict[str, Any]:
        """Register a worker, as POST /workers does; its entry of GET /workers.

        Raises:
            ConflictError: Registered already, or another block size than the model's.
            InvalidArgumentError: A field that cannot be, by name.
            OverloadedError: The limit of workers or models is reached.
        """
        return dict(self.call("POST", "/workers", worker))

    def remove_worker(self, worker_id: int) -> None:
        """Forget a worker, its blocks and its requests.

        Raises:
            NotFoundError: It is not registered.
        """
        self.call("DELETE", f"/workers/{worker_id}")

    def announce_stop(self) -> None:
        """Tell whoever asks for readiness that it is about to stop; requests are still taken."""
        self._core.announce_stop()

    def set_warnings(self, warnings: list[str]) -> None:
        """What ``/health`` warns of besides its own findings; replaces what it was told before."""
        self._core.set_warnings(warnings)

    def stats(self) -> dict[str, dict[str, int]]:
        """Counters of the state that comes over NATS, by namespace.component."""
        return self._cluster.stats()

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Ask a route without HTTP between; the answer's JSON.

        Raises:
            InvalidArgumentError, NotFoundError, ConflictError, OverloadedError, NoWorkerError,
            AllBusyError: What HTTP answers with 400, 404, 409, 429 and 503.
        """
        sent = b"" if body is None else json.dumps(body).encode()
        return json.loads(self._core.call(method, path, sent))


def _numbered(workers: tuple[WorkerSpec, ...]) -> list[WorkerSpec]:
    """Give those without a number one that nobody has."""
    taken = {worker.worker_id for worker in workers}
    free = (number for number in range(1, 2**16) if number not in taken)
    return [
        worker
        if worker.worker_id is not None
        else dataclasses.replace(worker, worker_id=next(free))
        for worker in workers
    ]


def _registration(worker: WorkerSpec, model_name: str, tenant_id: str) -> dict[str, Any]:
    return {
        "worker_id": worker.worker_id,
        "model_name": model_name,
        "tenant_id": tenant_id,
        "url": worker.url,
        "dp_size": worker.dp_size,
        "endpoint": worker.events,
        "replay_endpoint": worker.replay,
    }
