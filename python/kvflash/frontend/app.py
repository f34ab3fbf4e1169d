"""The frontend process."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvflash._core import Frontend, model_folder
from kvflash.discovery import open_discovery
from kvflash.errors import ConfigError
from kvflash.flags import source_of
from kvflash.frontend.args import FrontendArgs, parse_args
from kvflash.policy import asked_of
from kvflash.process import FedService, run_service
from kvflash.roster.finder import add_named, find_workers
from kvflash.routing.cluster import Cluster

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger(__name__)


def make_frontend(args: FrontendArgs, fleet: dict[int, str] | None = None) -> Frontend:
    """Create the service from the settings; errors name the flag or file at fault.

    Fills ``fleet`` with the numbers and specs of the workers named by flags.
    """
    for named in args.tokenizer:
        _check_tokenizer(named)
    policy = asked_of(args.router_mode)
    frontend = Frontend(
        **args.core_settings(),
        policy_desk=None if policy is None else policy.desk,
        has_broker_events=args.event_plane == "nats",
        waits_for=args.waits_for(),
    )
    found = add_named(frontend, args)
    if fleet is not None:
        fleet.update(found)
    return frontend


def _check_tokenizer(named: str) -> None:
    # Here, because few frontends have such a folder.
    from pathlib import Path  # noqa: PLC0415

    model, sign, folder = named.partition("=")
    flag = source_of("--tokenizer", named)
    if not (model and sign) or Path(named).is_dir():
        folder = named
    else:
        flag += f" of {model}"
    try:
        model_folder(folder)
    except ConfigError as error:
        raise ConfigError(f"{flag} {error}") from None


def _component(fleet: dict[int, str]) -> tuple[str, str]:
    """The sharing group of routers with exactly the same workers under the same numbers."""
    # Here, because a frontend without replicas has no group.
    import hashlib  # noqa: PLC0415

    workers = [[number, spec.partition(",")[0]] for number, spec in sorted(fleet.items())]
    return "workers", hashlib.sha256(json.dumps(workers).encode()).hexdigest()[:16]


class Reports:
    """Gives the core the last report of each part, combined. Callable from any thread."""

    def __init__(self, core: Frontend) -> None:
        self._core = core
        self._lock = threading.Lock()
        self._metrics: dict[str, str] = {}
        self._warnings: dict[str, list[str]] = {}

    def metrics_of(self, part: str) -> Callable[[str], None]:
        """Return a function that takes a part's lines in the OpenMetrics text format."""

        def show(text: str) -> None:
            with self._lock:
                self._metrics[part] = text
                self._core.set_more_metrics("".join(self._metrics.values()))

        return show

    def warnings_of(self, part: str) -> Callable[[list[str]], None]:
        """Return a function that takes a part's warnings."""

        def show(warnings: list[str]) -> None:
            with self._lock:
                self._warnings[part] = warnings
                self._core.set_warnings([text for part in self._warnings.values() for text in part])

        return show


class _Watched(FedService):
    """The service, with its watches of discovery and DNS."""

    def __init__(self, frontend: Frontend, args: FrontendArgs, fleet: dict[int, str]) -> None:
        self._fleet, self._args = fleet, args
        reports = Reports(frontend)
        kind = args.discovery_kind
        args.check_cluster(has_discovery=kind is not None, needs="--discovery")
        # Started after the service, in this order, and stopped before it, in reverse.
        self._parts: list[Any] = []
        if args.finds_indexer:
            if kind is None:
                raise ConfigError(
                    "--use-remote-indexer without a URL needs --discovery: it is found there"
                )
            # Without it asyncio need not be loaded.
            from kvflash.roster.indexers import IndexerFinder  # noqa: PLC0415

            show = frontend.set_remote_indexer
            self._parts.append(IndexerFinder(kind, args.namespace, show))
        self._cluster = Cluster(
            frontend,
            args,
            open_discovery=lambda: open_discovery(kind),
            show_metrics=reports.metrics_of("cluster"),
            show_warnings=reports.warnings_of("cluster"),
        )
        super().__init__(
            frontend,
            host=args.host,
            port=args.port,
            make_receiver=self._cluster.make_receiver,
            is_encrypted=args.tls_cert_path is not None,
        )
        self._parts += find_workers(
            frontend,
            args,
            report_load=frontend.report_load,
            replicas=self._cluster,
            show_metrics=reports.metrics_of("dns"),
            warnings_of=reports.warnings_of,
            has_shared_ids=args.use_remote_indexer is not None or args.serve_indexer,
        )

    def start(self) -> Self:
        self._cluster.check()
        super().start()
        self._cluster.start()
        if self._args.router_replica_sync:
            self._share_fleet()
        args, kind = self._args, self._args.discovery_kind
        if args.serve_indexer and kind is not None:
            from kvflash.roster.indexers import AnnouncedIndexer  # noqa: PLC0415

            self._parts.append(AnnouncedIndexer(kind, args.namespace, args.host, self.url))
        for part in self._parts:
            part.start()
        return self

    def _share_fleet(self) -> None:
        if not self._fleet:
            return
        group = _component(self._fleet)
        logger.info(
            "shares its requests with frontends that have the same %d workers of --worker under "
            "the same numbers: group %s, the same in their logs",
            len(self._fleet),
            group[1],
        )
        for number in self._fleet:
            self._cluster.worker_joined(group, number)

    def stop(self) -> None:
        for part in reversed(self._parts):
            part.stop()
        # Streams may go on for a while, and their load is shared until they end.
        super().stop()
        self._cluster.stop()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the frontend until a signal. Returns the exit status."""
    return run_service("frontend", parse_args, _make, argv)


def _make(args: FrontendArgs) -> _Watched:
    fleet: dict[int, str] = {}
    return _Watched(make_frontend(args, fleet), args, fleet)
