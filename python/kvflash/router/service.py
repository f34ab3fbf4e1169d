"""The router in a process of the caller's own: HTTP service, index and event transport."""

from __future__ import annotations

import dataclasses
import json
from types import TracebackType
from typing import Any

from kvflash._core import Router
from kvflash.errors import (
    AllBusyError,
    ConfigError,
    ConflictError,
    InvalidArgumentError,
    KvflashError,
    NotFoundError,
    NoWorkerError,
    OverloadedError,
)
from kvflash.process import FedService
from kvflash.router.args import RouterArgs, WorkerSpec
from kvflash.router.endpoint import EndpointThread

__all__ = ["RouterService"]

_ERRORS: dict[int, type[KvflashError]] = {
    400: InvalidArgumentError,
    404: NotFoundError,
    409: ConflictError,
    422: InvalidArgumentError,
    429: OverloadedError,
    503: NoWorkerError,
}


class RouterService:
    """The standalone router as an object; ``python -m kvflash.router`` is one of these.

    With an ``endpoint`` its workers are found through discovery, and requests are routed on the
    request plane as well. Several may live in one process. It takes no signals, and leaves the
    set-up of logging to the process. It starts once and stops once.

    Args:
        args: Settings; those of a command line come from ``parse_args``.
        **settings: Fields of ``RouterArgs``, by name.

    Raises:
        ConfigError: Names the flag that can't work, and what is legal.
        TypeError: There is no such setting.
    """

    def __init__(self, args: RouterArgs | None = None, **settings: Any) -> None:
        args = dataclasses.replace(args or RouterArgs(), **settings)
        self._core = Router(
            **args.core_settings(),
            block_size=args.kv_cache_block_size,
            threads=args.threads,
            max_body_bytes=args.max_body_bytes,
            max_requests=args.max_concurrent_requests,
            max_workers=args.max_workers,
            body_timeout_s=args.body_timeout,
            drain_timeout_s=args.drain_timeout,
        )
        for worker in _numbered(args.workers):
            try:
                self.add_worker(_registration(worker, args.model_name, args.tenant_id))
            except KvflashError as error:
                raise ConfigError(f"--worker {worker.url}: {error}") from None
        self._service = FedService(self._core, host=args.host, port=args.port)
        self._endpoint: EndpointThread | None = None
        if args.endpoint is not None:
            self._endpoint = EndpointThread(self, args.endpoint, model_name=args.model_name)
        #: Whether a call may take as long as another process takes to answer.
        self.may_wait = args.use_remote_indexer is not None

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

    def start(self) -> RouterService:
        """Serve HTTP and receive events in the background.

        Raises:
            ConfigError: The address can't be bound.
            ClosedError: It was started before.
        """
        self._service.start()
        if self._endpoint is not None:
            self._endpoint.start()
        return self

    def stop(self) -> None:
        """Stop serving and receiving; open calls get the drain time. Blocks until done."""
        if self._endpoint is not None:
            self._endpoint.stop()
        self._service.stop()

    def __enter__(self) -> RouterService:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Ask a route without HTTP between; the answer's JSON.

        Raises:
            InvalidArgumentError, NotFoundError, ConflictError, OverloadedError, NoWorkerError,
            AllBusyError: What HTTP answers with 400, 404, 409, 429 and 503.
        """
        status, answer = self._core.call(
            method, path, b"" if body is None else json.dumps(body).encode()
        )
        parsed = json.loads(answer)
        if status < 400:
            return parsed
        message = str(parsed.get("error", parsed))
        kind = _ERRORS.get(status, KvflashError)
        if message.startswith("Service temporarily unavailable"):
            kind = AllBusyError
        raise kind(message)


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
