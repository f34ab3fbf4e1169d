"""Answers for a DNS name: failures keep addresses, empty answers are doubted, too many are cut."""

from __future__ import annotations

from ipaddress import ip_address

from kvflash.roster.dns_answers import ADDRESSES_MAX, EMPTY_MAX, KnownName
from kvflash.roster.dns_spec import DnsWorkers

ONE, TWO, SIX = (ip_address(text) for text in ("10.0.0.1", "10.0.0.2", "fd00::1"))


def known(*records: str) -> KnownName:
    label = "dns+http://engines:8000"
    workers = DnsWorkers(label=label, name="engines", records=records or ("A",), template="")
    return KnownName(workers)


def test_the_last_answer_counts():
    name = known()
    assert name.addresses() == []
    name.answers["A"].take([TWO, ONE, ONE])
    assert name.addresses() == [ONE, TWO]
    name.answers["A"].take([TWO])
    assert name.addresses() == [TWO]
    assert name.notes() == {}
    assert name.failures() == []
    assert dict(name.answers["A"].counts) == {"answered": 2, "empty": 0, "failed": 0}


def test_records_are_put_together_in_order():
    name = known("A", "AAAA")
    name.answers["AAAA"].take([SIX])
    name.answers["A"].take([TWO, ONE])
    assert name.addresses() == [ONE, TWO, SIX]
    name.answers["A"].fail("timeout")
    name.answers["AAAA"].take([])
    assert name.addresses() == [ONE, TWO, SIX]


def test_a_failure_keeps_what_is_known_and_says_so():
    name = known()
    name.answers["A"].fail("SERVFAIL")
    assert name.failures() == [
        "dns+http://engines:8000: the lookup (A) fails: SERVFAIL; no address is known"
    ]
    assert name.notes() == {}
    name.answers["A"].take([ONE, TWO])
    assert name.failures() == []
    for _ in range(EMPTY_MAX + 1):
        name.answers["A"].fail("SERVFAIL")
    assert name.addresses() == [ONE, TWO]
    assert name.failures() == [
        "dns+http://engines:8000: the lookup (A) fails: SERVFAIL; the 2 known addresses stay in use"
    ]


def test_empty_answers_are_believed_three_in_a_row():
    name = known()
    answers = name.answers["A"]
    answers.take([ONE])
    for _ in range(2):
        answers.take([])
        answers.take([])
        assert name.addresses() == [ONE]
        assert "the last answer (A) had no address" in name.notes()["empty A"]
        answers.fail("SERVFAIL")
        assert name.notes() == {}
    answers.take([])
    answers.take([])
    answers.take([])
    assert name.addresses() == []
    assert name.notes() == {
        "the name has no address": "dns+http://engines:8000: the name has no address"
    }
    answers.take([TWO])
    assert name.addresses() == [TWO]
    assert name.notes() == {}
    assert answers.counts["empty"] == 7


def test_a_name_that_never_had_an_address_needs_no_doubt():
    name = known("A", "AAAA")
    assert name.notes() == {"not looked up yet": "dns+http://engines:8000: not looked up yet"}
    name.answers["A"].take([])
    assert "not looked up yet" in name.notes()
    name.answers["AAAA"].take([])
    assert "the name has no address" in name.notes()


def test_beyond_the_limit_the_first_ones_in_order_stay():
    name = known()
    many = [ip_address(f"10.1.{n // 256}.{n % 256}") for n in range(ADDRESSES_MAX + 2)]
    name.answers["A"].take(reversed(many))
    assert name.addresses() == many[:ADDRESSES_MAX]
    assert name.notes()["limit"] == (
        "dns+http://engines:8000: it has 4098 addresses, and the first 4096 in order are used, "
        "the limit per name"
    )
    name.answers["A"].take(many[1:])
    assert name.addresses() == many[1 : ADDRESSES_MAX + 1]
