"""Keeps the frontend's workers equal to the addresses of names in DNS."""

import contextlib
import logging
from collections.abc import Callable, Iterable

from kvflash.errors import ConflictError, KvflashError, NotFoundError
from kvflash.roster.core import Fleet, Replicas
from kvflash.roster.dns_answers import KnownName
from kvflash.roster.dns_spec import Address, DnsWorkers
from kvflash.roster.shared import shared_id, shared_name

logger = logging.getLogger(__name__)


class DnsFleet:
    """Adds engines at new addresses of names, and removes those that no name has any more.

    An address of two names is a worker of the first name, in the order of the flags. An engine that
    is registered in another way stays unchanged. One that is removed by hand stays away until its
    address has left DNS. With ``has_shared_ids`` workers have the same number in every process, for
    routers that ask the index of another process.
    """

    def __init__(self, core: Fleet, replicas: Replicas, *, has_shared_ids: bool = False) -> None:
        self._core, self._replicas = core, replicas
        self._has_shared_ids = has_shared_ids
        self._found: list[tuple[DnsWorkers, list[Address]]] = []
        # Specs in the core, with worker number, by URL.
        self._told: dict[str, tuple[str, int]] = {}
        # Errors of specs that the core refused, by URL.
        self._refused: dict[str, KvflashError] = {}

    def keep(self, names: Iterable[KnownName]) -> None:
        """Make the workers equal to the addresses of these names.

        Cost: O(addresses) if they changed or some were refused, plus for each new address the cost
        of adding a worker to the core.
        """
        now = [(known.workers, known.addresses()) for known in names]
        if now == self._found and not self._refused:
            return
        self._found = now
        wanted: dict[str, tuple[str, DnsWorkers]] = {}
        for name, addresses in now:
            for spec in map(name.spec, addresses):
                wanted.setdefault(spec.partition(",")[0], (spec, name))
        for url, (spec, number) in list(self._told.items()):
            if url not in wanted or wanted[url][0] != spec:
                del self._told[url]
                self._remove(url, number)
        before, self._refused = self._refused, {}
        for url, (spec, name) in wanted.items():
            if url not in self._told:
                self._add(url, spec, name)
        self._tell_refused(before)

    def warnings(self) -> list[str]:
        """Messages about refused engines, except those that are workers already."""
        found: dict[str, list[str]] = {}
        for url, error in self._refused.items():
            if not isinstance(error, ConflictError):
                found.setdefault(str(error), []).append(url)
        return [
            f"{len(urls)} engines found by DNS are not used, such as {urls[0]}: {why}"
            for why, urls in found.items()
        ]

    def _add(self, url: str, spec: str, name: DnsWorkers) -> None:
        try:
            number = self._core.add_worker(
                f"{spec},id={shared_id(url)}" if self._has_shared_ids else spec
            )
        except KvflashError as error:
            self._refused[url] = error
            return
        self._told[url] = (spec, number)
        # Where replicas with the same name find each other.
        component = ("workers", f"dns-{shared_name(name.label)}")
        self._tell_replicas(self._replicas.worker_joined, component, number, shared_id(url))
        logger.info("worker %d: %s has %s", number, name.label, url)

    def _remove(self, url: str, number: int) -> None:
        logger.info("worker %d: DNS no longer lists %s; its running requests continue", number, url)
        # DELETE /workers may have removed it first.
        with contextlib.suppress(NotFoundError):
            self._core.remove_worker(number)
        self._tell_replicas(self._replicas.worker_gone, number)

    @staticmethod
    def _tell_replicas(tell: Callable[..., None], *what: object) -> None:
        try:
            tell(*what)
        except Exception:
            logger.exception("could not inform replicas of the engines found by DNS")

    def _tell_refused(self, before: dict[str, KvflashError]) -> None:
        """Log one line for all that were not refused in the same way at the last lookup."""
        fresh = [u for u, why in self._refused.items() if str(before.get(u)) != str(why)]
        if fresh:
            first = fresh[0]
            is_trouble = any(not isinstance(self._refused[u], ConflictError) for u in fresh)
            logger.log(
                logging.WARNING if is_trouble else logging.INFO,
                "%d engines found by DNS are not added, such as %s: %s; trying again at every "
                "lookup",
                len(fresh), first, self._refused[first],
            )  # fmt: skip
