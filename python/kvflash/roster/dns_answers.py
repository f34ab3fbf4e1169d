"""What a name's answers add up to: pure, without sockets and without a clock."""

from collections import Counter
from collections.abc import Iterable

from kvflash.roster.dns_spec import Address, DnsWorkers

#: Empty answers in a row after which a name counts as having no address. A single one may be
#: wrong, and would make the router forget what all engines hold.
EMPTY_MAX = 3
#: Addresses of a name that become workers.
ADDRESSES_MAX = 4_096


class Answers:
    """State of one kind of record."""

    def __init__(self) -> None:
        #: The last accepted addresses; none once enough answers were empty.
        self.addresses: frozenset[Address] = frozenset()
        #: Empty answers since the last one with an address.
        self.empty = 0
        #: Why the last lookup failed; None if it succeeded.
        self.failure: str | None = None
        #: Lookups by outcome.
        self.counts = Counter(answered=0, empty=0, failed=0)

    def take(self, found: Iterable[Address]) -> None:
        """Record an answer of the name server."""
        addresses = frozenset(found)
        self.failure = None
        self.counts["answered" if addresses else "empty"] += 1
        self.empty = 0 if addresses else self.empty + 1
        if addresses or not self.addresses or self.empty >= EMPTY_MAX:
            self.addresses = addresses

    def fail(self, why: str) -> None:
        """Record a failed lookup: the addresses stay, and the count of empty answers restarts."""
        self.counts["failed"] += 1
        self.failure, self.empty = why, 0


class KnownName:
    """State of a name over all its kinds of records, such as ``A``; messages show its label."""

    def __init__(self, workers: DnsWorkers) -> None:
        self.workers, self.label = workers, workers.label
        self.answers = {record: Answers() for record in workers.records}

    def addresses(self) -> list[Address]:
        """Addresses that become workers: the first ones in order, IPv4 before IPv6."""
        return sorted(self._all(), key=lambda one: (one.version, int(one)))[:ADDRESSES_MAX]

    def failures(self) -> list[str]:
        """Messages about lookups that fail."""
        count = len(self._all())
        known = f"the {count} known addresses stay in use" if count else "no address is known"
        return [
            f"{self.label}: the lookup ({record}) fails: {one.failure}; {known}"
            for record, one in self.answers.items()
            if one.failure is not None
        ]

    def notes(self) -> dict[str, str]:
        """Messages about other problems of the answers, by kind."""
        found, count = {}, len(self._all())
        for record, one in self.answers.items():
            if one.empty and one.addresses:
                found[f"empty {record}"] = (
                    f"{self.label}: the last answer ({record}) had no address; the workers are "
                    f"dropped after {EMPTY_MAX} such answers in a row, until then the "
                    f"{len(one.addresses)} that are known stay"
                )
        if count == 0 and not self.failures():
            is_told = all(any(one.counts.values()) for one in self.answers.values())
            what = "the name has no address" if is_told else "not looked up yet"
            found[what] = f"{self.label}: {what}"
        if count > ADDRESSES_MAX:
            found["limit"] = (
                f"{self.label}: it has {count} addresses, and the first {ADDRESSES_MAX} in order "
                "are used, the limit per name"
            )
        return found

    def _all(self) -> frozenset[Address]:
        return frozenset[Address]().union(*(one.addresses for one in self.answers.values()))
