"""The result of a check."""

from dataclasses import dataclass

OK, WARN, FAIL = "ok", "warn", "FAIL"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report: a level, a URL or a worker there, and the name of the check.

    ``fix`` is empty for ``ok``; ``code`` is the service's for the cause, if it gives one.
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


def warn(subject: str, check: str, seen: str, fix: str, code: str = "") -> Finding:
    """It works, but not as well as it could, or that can't be determined."""
    return Finding(level=WARN, subject=subject, check=check, seen=seen, fix=fix, code=code)


def fail(subject: str, check: str, seen: str, fix: str, code: str = "") -> Finding:
    """It does not work."""
    return Finding(level=FAIL, subject=subject, check=check, seen=seen, fix=fix, code=code)
