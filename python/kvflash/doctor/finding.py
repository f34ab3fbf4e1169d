"""The result of a check."""

from dataclasses import dataclass

OK, WARN, FAIL = "ok", "warn", "FAIL"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report.

    Attributes:
        level: ``ok``, ``warn`` or ``FAIL``.
        subject: What was checked: a URL, or a worker of the indexer there.
        check: Name of the check, in fixed words.
        seen: What was observed.
        fix: What to do; empty for ``ok``.
        code: The code of the reason, if an indexer gave one for not trusting a worker.
    """

    level: str
    subject: str
    check: str
    seen: str
    fix: str = ""
    code: str = ""


def ok(subject: str, check: str, seen: str) -> Finding:
    """All is well."""
    return Finding(level=OK, subject=subject, check=check, seen=seen)


def warn(subject: str, check: str, seen: str, fix: str) -> Finding:
    """It works, but not as well as it could, or that can't be determined."""
    return Finding(level=WARN, subject=subject, check=check, seen=seen, fix=fix)


def fail(subject: str, check: str, seen: str, fix: str) -> Finding:
    """It does not work."""
    return Finding(level=FAIL, subject=subject, check=check, seen=seen, fix=fix)
