"""Looks up names in DNS repeatedly, and keeps their addresses as the frontend's workers."""

import asyncio
import ipaddress
import logging
from collections.abc import Callable, Sequence

import dns.asyncresolver
import dns.exception
import dns.resolver

from kvflash.background import Background
from kvflash.outage import Outage
from kvflash.roster.core import Fleet, Replicas, exposed
from kvflash.roster.dns_answers import KnownName
from kvflash.roster.dns_fleet import DnsFleet
from kvflash.roster.dns_spec import Address, DnsWorkers

logger = logging.getLogger(__name__)

# A lookup that takes longer has failed. The limit is the interval, within these bounds.
LOOKUP_S_MIN, LOOKUP_S_MAX = 3.0, 5.0

#: Address and port of a name server.
Server = tuple[str, int]


class DnsWatch(Background):
    """Looks up names, in the order of the flags, each kind of record independently.

    Workers, metrics (in the OpenMetrics text format) and warnings reflect a lookup before the next
    lookup of that record starts, ``interval_s`` later. Without a ``server`` the name servers are
    those of ``/etc/resolv.conf``, which is read again after a failure.
    """

    def __init__(
        self,
        core: Fleet,
        names: Sequence[DnsWorkers],
        *,
        interval_s: float,
        server: Server | None,
        replicas: Replicas,
        show_metrics: Callable[[str], None],
        show_warnings: Callable[[list[str]], None],
        has_shared_ids: bool = False,
    ) -> None:
        self._fleet = DnsFleet(core, replicas, has_shared_ids=has_shared_ids)
        self._names = [KnownName(name) for name in names]
        self._interval_s, self._server = interval_s, server
        self._lookup_s = min(max(interval_s, LOOKUP_S_MIN), LOOKUP_S_MAX)
        self._show_metrics, self._show_warnings = show_metrics, show_warnings
        self._noted = {known.label: set(known.notes()) for known in self._names}
        self._outages = {
            known.label: Outage(logger, f"{known.label}: lookups are answered again")
            for known in self._names
        }
        self._resolver: dns.asyncresolver.Resolver | None = None
        super().__init__("kvflash-dns", self._look_up_all)
        self._tell()

    async def _look_up_all(self) -> None:
        # A record that hangs does not block the others.
        lookups = [
            self._look_up_for_ever(known, record)
            for known in self._names
            for record in known.answers
        ]
        await asyncio.gather(*lookups)

    async def _look_up_for_ever(self, known: KnownName, record: str) -> None:
        while True:
            await self._look_up(known, record)
            try:
                self._settle(known)
            except Exception:
                logger.exception("%s: its addresses", known.label)
            await asyncio.sleep(self._interval_s)

    async def _look_up(self, known: KnownName, record: str) -> None:
        answers = known.answers[record]
        try:
            resolver = self._resolver = self._resolver or self._make_resolver()
            answers.take(await self._ask(resolver, known.workers.name, record))
            return
        except dns.exception.Timeout:
            servers = ", ".join(map(str, resolver.nameservers))
            answers.fail(f"{servers} did not answer within {self._lookup_s:g} s")
        except (dns.exception.DNSException, OSError) as error:
            answers.fail(str(error))
        except Exception as error:
            # Known workers stay in service, and only this task can find new ones.
            logger.exception("%s: the lookup (%s)", known.label, record)
            answers.fail(repr(error))
        # The file may name other servers by now.
        self._resolver = None

    async def _ask(
        self, resolver: dns.asyncresolver.Resolver, name: str, record: str
    ) -> list[Address]:
        """The name's addresses; none if the name does not exist or has no such record."""
        try:
            answer = await resolver.resolve(
                name, record, raise_on_no_answer=False, search=True, lifetime=self._lookup_s
            )
        except dns.resolver.NXDOMAIN:
            return []
        return [ipaddress.ip_address(data.address) for data in answer]

    def _make_resolver(self) -> dns.asyncresolver.Resolver:
        if self._server is None:
            return dns.asyncresolver.Resolver()
        # Uses the machine's search domains, if any.
        try:
            resolver = dns.asyncresolver.Resolver()
        except dns.resolver.NoResolverConfiguration:
            resolver = dns.asyncresolver.Resolver(configure=False)
        resolver.nameservers = [self._server[0]]
        resolver.port = self._server[1]
        return resolver

    def _settle(self, known: KnownName) -> None:
        failures, notes = known.failures(), known.notes()
        outage, noted = self._outages[known.label], self._noted[known.label]
        if failures:
            outage.lasts(failures[0])
        else:
            outage.ends()
        for what in notes.keys() - noted:
            logger.warning("%s", notes[what])
        self._noted[known.label] = set(notes)
        self._fleet.keep(self._names)
        self._tell()

    def _tell(self) -> None:
        warnings: list[str] = []
        for known in self._names:
            warnings += [*known.failures(), *known.notes().values()]
        self._show_warnings(warnings + self._fleet.warnings())
        lookups = {
            f'name="{known.label}",record="{record}",outcome="{outcome}"': {"lookups_total": count}
            for known in self._names
            for record, answers in known.answers.items()
            for outcome, count in answers.counts.items()
        }
        found = {f'name="{one.label}"': {"addresses": len(one.addresses())} for one in self._names}
        self._show_metrics(exposed("kvflash_dns_", lookups | found))
