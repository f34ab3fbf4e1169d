"""What a name's answers amount to: pure, no sockets and no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kvflash.roster.dns_spec import Address

__all__ = ["ADDRESSES_MAX", "EMPTY_MAX", "Answers", "KnownName"]

#: Empty answers in a row after which a name is believed to have no address. One may be wrong, and
#: would forget what all engines hold.
EMPTY_MAX = 3
#: Addresses of a name that become workers.
ADDRESSES_MAX = 4_096


class Answers:
    """What is known of one kind of record.

    Attributes:
        addresses: The last ones that were told, or none once that is believed.
        is_told: There was an answer that was believed.
        empty: Empty answers since the last one with an address.
        failure: Why the last lookup failed, in words; None: it did not.
        counts: Lookups by outcome: ``answered``, ``empty``, ``failed``.
    """

    def __init__(self) -> None:
        self.addresses: frozenset[Address] = frozenset()
        self.is_told = False
        self.empty = 0
        self.failure: str | None = None
        self.counts = Counter(answered=0, empty=0, failed=0)

    def take(self, found: Iterable[Address]) -> None:
        """The name server has answered."""
        addresses = frozenset(found)
        self.failure = None
        self.counts["answered" if addresses else "empty"] += 1
        self.empty = 0 if addresses else self.empty + 1
        if addresses or not self.addresses or self.empty >= EMPTY_MAX:
            self.addresses, self.is_told = addresses, True

    def fail(self, why: str) -> None:
        """It has not: what is known stays, and empty answers before are not believed."""
        self.counts["failed"] += 1
        self.failure, self.empty = why, 0


class KnownName:
    """What is known of a name, by all records that it is asked for.

    Args:
        label: What it is called in words.
        records: Such as ``A``.
    """

    def __init__(self, label: str, records: Sequence[str]) -> None:
        self.label = label
        self.answers = {record: Answers() for record in records}

    @property
    def is_failing(self) -> bool:
        """The last lookup of a record has failed."""
        return any(one.failure is not None for one in self.answers.values())

    def addresses(self) -> list[Address]:
        """Those that become workers: the first ones in order, IPv4 before IPv6."""
        return sorted(self._all(), key=lambda one: (one.version, int(one)))[:ADDRESSES_MAX]

    def failures(self) -> list[str]:
        """Lookups that fail, in words."""
        count = len(self._all())
        known = f"the {count} known addresses stay in use" if count else "no address is known"
        return [
            f"{self.label}: the lookup ({record}) fails: {one.failure}; {known}"
            for record, one in self.answers.items()
            if one.failure is not None
        ]

    def notes(self) -> dict[str, str]:
        """What else is wrong with what was answered, in words, by what it is."""
        found, count = {}, len(self._all())
        for record, one in self.answers.items():
            if one.empty and one.addresses:
                found[f"empty {record}"] = (
                    f"{self.label}: the last answer ({record}) had no address; the workers are "
                    f"dropped after {EMPTY_MAX} such answers in a row, until then the "
                    f"{len(one.addresses)} that are "
                    "known stay"
                )
        if count == 0 and not self.is_failing:
            is_told = all(one.is_told for one in self.answers.values())
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
