"""All ways in which a service finds its workers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvflash.address import masked
from kvflash.discovery import open_discovery
from kvflash.errors import ConfigError, ConflictError, InvalidArgumentError
from kvflash.roster.core import Fleet, Replicas
from kvflash.roster.flags import FleetFlags

if TYPE_CHECKING:
    from kvflash.background import Background
    from kvflash.roster.dns_spec import DnsWorkers

logger = logging.getLogger(__name__)


def add_named(core: Fleet, flags: FleetFlags) -> dict[int, str]:
    """Add the engines that flags name by URL; returns their numbers and specs.

    ConfigError names a faulty flag and field; ConflictError names the flag of a worker of which
    another one has the URL, the id or the event socket.
    """
    found = {}
    for source, spec, role in flags.named_workers(in_dns=False):
        try:
            found[core.add_worker(spec + role)] = spec + role
        except (ConfigError, ConflictError, InvalidArgumentError) as error:
            said = str(error).removeprefix(f'--worker "{spec}{role}": ')
            kind = ConflictError if isinstance(error, ConflictError) else ConfigError
            raise kind(f"{source} {masked(spec)!r}: {said}") from error
    return found


def _names(flags: FleetFlags) -> list[DnsWorkers]:
    """The workers among the flags that are names in DNS; ConfigError names a faulty flag."""
    found: list[DnsWorkers] = []
    for source, spec, role in flags.named_workers(in_dns=True):
        # Without names the DNS client need not be loaded.
        from kvflash.roster.dns_spec import DnsWorkers  # noqa: PLC0415

        try:
            name = DnsWorkers.parse(spec + role)
        except ConfigError as error:
            raise ConfigError(f"{source} {spec!r}: {error}") from error
        if any(name.label == other.label for other in found):
            raise ConfigError(f"{source} {spec!r}: {name.label} is given twice")
        found.append(name)
    return found


def find_workers(
    core: Fleet,
    flags: FleetFlags,
    *,
    replicas: Replicas,
    show_metrics: Callable[[str], None],
    warnings_of: Callable[[str], Callable[[list[str]], None]],
    report_load: Callable[[str], None] | None = None,
    has_shared_ids: bool = False,
) -> list[Background]:
    """Prepare to follow discovery and names in DNS, each if used; ConfigError names a faulty flag.

    ``show_metrics`` takes lines of the OpenMetrics text format; ``warnings_of`` returns what takes
    the messages about problems of ``dns`` or ``discovery``; without ``report_load`` the core takes
    no requests; with ``has_shared_ids`` engines in DNS have the same number in every process.
    """
    names, kind = _names(flags), flags.discovery_kind
    found: list[Background] = []
    if kind is not None:
        # Without discovery its event loop need not be loaded.
        from kvflash.roster.watch import DiscoveryWatch  # noqa: PLC0415

        watch = DiscoveryWatch(
            core,
            open_discovery(kind),
            namespace=flags.namespace,
            cluster=replicas,
            report_load=report_load,
            show_warnings=warnings_of("discovery"),
        )
        found.append(watch)
    if names:
        from kvflash.roster.dns_watch import DnsWatch  # noqa: PLC0415

        lookups = DnsWatch(
            core,
            names,
            interval_s=flags.worker_dns_interval_secs,
            server=flags.worker_dns_server,
            replicas=replicas,
            show_metrics=show_metrics,
            show_warnings=warnings_of("dns"),
            has_shared_ids=has_shared_ids,
        )
        found.append(lookups)
    if found:
        logger.info("waiting for %s", flags.waits_for())
    return found
