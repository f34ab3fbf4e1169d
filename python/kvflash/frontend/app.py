"""The frontend process."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

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

    from kvflash.background import Background

logger = logging.getLogger(__name__)


def make_frontend(args: FrontendArgs) -> tuple[Frontend, dict[int, str]]:
    """Create the service from the settings; errors name the flag or file at fault.

    Returns it with the numbers and specs of the workers named by flags.
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
    if policy is not None:
        policy.start()
    return frontend, add_named(frontend, args)


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
    from kvflash.roster.shared import shared_name  # noqa: PLC0415

    workers = [[number, spec.partition(",")[0]] for number, spec in sorted(fleet.items())]
    return "workers", shared_name(json.dumps(workers))


class Reports:
    """Gives the core the last report of each part, combined. Callable from any thread."""

    def __init__(self, core: Frontend) -> None:
        self._core = core
        self._lock = threading.Lock()
        self._metrics: dict[str, str] = {}
        self._warnings: dict[str, list[str]] = {}

    def show_metrics(self, part: str, text: str) -> None:
        """Take a part's lines in the OpenMetrics text format."""
        with self._lock:
            self._metrics[part] = text
            self._core.set_more_metrics("".join(self._metrics.values()))

    def show_warnings(self, part: str, warnings: list[str]) -> None:
        """Take a part's warnings."""
        with self._lock:
            self._warnings[part] = warnings
            self._core.set_warnings([text for part in self._warnings.values() for text in part])


class _Watched(FedService):
    """The service, with its watches of discovery and DNS."""

    def __init__(self, args: FrontendArgs) -> None:
        frontend, self._fleet = make_frontend(args)
        reports = Reports(frontend)
        kind = args.discovery_kind
        args.check_cluster(has_discovery=kind is not None, needs="--discovery")
        parts: list[Background] = []
        if args.finds_indexer:
            if kind is None:
                raise ConfigError(
                    "--use-remote-indexer without a URL finds the indexer in discovery: set "
                    "--discovery, or give the URL"
                )
            # Without it asyncio need not be loaded.
            from kvflash.roster.indexers import IndexerFinder  # noqa: PLC0415

            show = frontend.set_remote_indexer
            parts.append(IndexerFinder(kind, args.namespace, show))
        self._cluster = Cluster(
            frontend,
            args,
            open_discovery=lambda: open_discovery(kind),
            show_metrics=partial(reports.show_metrics, "cluster"),
            show_warnings=partial(reports.show_warnings, "cluster"),
        )
        parts += find_workers(
            frontend,
            args,
            report_load=frontend.report_load,
            replicas=self._cluster,
            show_metrics=partial(reports.show_metrics, "dns"),
            warnings_of=lambda part: partial(reports.show_warnings, part),
            has_shared_ids=args.use_remote_indexer is not None or args.serve_indexer,
        )
        if args.serve_indexer and kind is not None:
            from kvflash.roster.indexers import AnnouncedIndexer  # noqa: PLC0415

            parts.append(AnnouncedIndexer(kind, args.namespace, args.host, lambda: self.url))
        super().__init__(frontend, args, replicas=self._cluster, parts=parts)

    def start(self) -> Self:
        super().start()
        if self._args.router_replica_sync and self._fleet:
            self._share_fleet()
        return self

    def _share_fleet(self) -> None:
        group = _component(self._fleet)
        logger.info(
            "sharing load with frontends that have the same %d --worker workers under the same "
            "ids: group %s, which their logs show too",
            len(self._fleet),
            group[1],
        )
        for number in self._fleet:
            self._cluster.worker_joined(group, number)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the frontend until a signal. Returns the exit status."""
    return run_service("frontend", parse_args, _Watched, argv)
