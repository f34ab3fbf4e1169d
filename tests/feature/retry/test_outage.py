"""Log messages about a server that is down."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from kvflash.outage import REMIND_S, Outage


def test_an_outage_is_told_once_then_now_and_then_and_its_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    now = [0.0]
    shown: list[str] = []
    logger = logging.getLogger("kvflash")
    monkeypatch.setattr("kvflash.outage.time", SimpleNamespace(monotonic=lambda: now[0]))
    outage = Outage(logger, "it answers again", shown.append)
    outage.ends()
    for second in range(1, 121):
        now[0] = float(second)
        outage.lasts(f"away at {second}")
    assert [record.message for record in caplog.records] == [
        "away at 1",
        f"away at {1 + REMIND_S:g}",
    ]
    caplog.clear()
    # A problem that an operator must fix is not hidden by earlier messages.
    outage.lasts("refused", kind=True)
    outage.ends()
    outage.ends()
    outage.lasts("away again")
    assert [record.message for record in caplog.records] == [
        "refused",
        "it answers again after at least 119.0 s",
        "away again",
    ]
    # Every failure is shown, whether logged or not.
    assert (shown[:2], shown[-3:]) == (["away at 1", "away at 2"], ["refused", "", "away again"])


def test_the_traceback_of_an_unexpected_error_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("kvflash.outage.time", SimpleNamespace(monotonic=lambda: now[0]))
    outage = Outage(logging.getLogger("kvflash"), "it answers again")
    error = KeyError("x")
    outage.lasts("away", kind=OSError)
    outage.lasts("broken", kind=KeyError, unexpected=error)
    now[0] += REMIND_S
    outage.lasts("still broken", kind=KeyError, unexpected=error)
    assert [(record.message, bool(record.exc_info)) for record in caplog.records] == [
        ("away", False),
        ("broken", True),
        ("still broken", False),
    ]
