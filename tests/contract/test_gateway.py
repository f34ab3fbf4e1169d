"""The gateway contract: one table of cases, and every entrance gives the same answer to each."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from service import until
from support_gateway import BLOCK, ENTRANCES, KNOWLEDGE, MANNERS, Request, Workers

TABLE = json.loads(Path(__file__).with_name("gateway.json").read_text(encoding="utf-8"))
CASES = {case["id"]: case for case in TABLE["cases"]}
# Four blocks and the token that is always computed.
LENGTH = 4 * BLOCK + 2


def runs(entrance: str, case: dict[str, Any]) -> bool:
    return entrance != "decision" or not case.get("sends")


ALL = [(one, name) for one in ENTRANCES for name, case in CASES.items() if runs(one, case)]


def test_the_table_is_whole() -> None:
    assert len(CASES) == len(TABLE["cases"]) == 20
    assert len(ALL) == 4 * 20 - 6
    for case in CASES.values():
        assert set(case.get("differs", {})) <= set(ENTRANCES)
        assert len(case.get("differs", {})) < len(ENTRANCES) - 1, "which one is the rule?"


@pytest.mark.parametrize(("kind", "name"), ALL, ids=[f"{one}-{name}" for one, name in ALL])
def test_an_entrance_keeps_it(
    kind: str,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVFLASH_DISCOVERY", "file")
    monkeypatch.setenv("KVFLASH_DISCOVERY_DIR", str(tmp_path))
    case = CASES[name]
    told = case["workers"]
    with closing(Workers(len(told))) as workers:
        settings = {**KNOWLEDGE, **case.get("settings", {})}
        with closing(ENTRANCES[kind](workers, settings, tmp_path)) as entrance:
            play(
                entrance, workers, case, {**case["expect"], **case.get("differs", {}).get(kind, {})}
            )


def play(entrance: Any, workers: Workers, case: dict[str, Any], expected: dict[str, Any]) -> None:
    wish = case.get("request", {})
    prompt = list(range(1, 1 + wish.get("tokens", LENGTH)))
    for fake, told in zip(workers.fakes, case["workers"], strict=True):
        if blocks := told.get("holds"):
            entrance.ask(Request(prompt[: blocks * BLOCK], pin=fake.id))
    until(entrance.is_idle, "nothing to be booked")
    with ThreadPoolExecutor() as clients, ExitStack() as stack:
        stack.callback(workers.gate.set)
        others = list(occupy(clients.submit, entrance, workers, case))
        for fake, told in zip(workers.fakes, case["workers"], strict=True):
            fake.answer = MANNERS[told.get("does", "answers")]
            fake.received.clear()
        pin = wish.get("pin")
        request = Request(prompt, None if pin is None else pin + 1, wish.get("salt"))
        outcome = entrance.ask(request)
        got = {
            "status": outcome.status,
            "end": outcome.end,
            "worker": outcome.worker,
            "overlap": outcome.overlap,
            "tried": [at for at, fake in enumerate(workers.fakes) if fake.received],
        }
        assert {key: got[key] for key in expected} == expected
        for fake in workers.fakes:
            # A kept connection that ends without a byte may have been closed before: once more.
            assert len(fake.received) <= 1 + (fake.answer is MANNERS["closes"])
        workers.gate.set()
        assert {other.result().status for other in others} <= {200}
    # Whatever became of it, nothing stays booked.
    until(entrance.is_idle, "nothing to be booked")


def occupy(
    submit: Callable[..., Any], entrance: Any, workers: Workers, case: dict[str, Any]
) -> Any:
    """Requests that are at their workers until the gate opens."""
    for at, (fake, told) in enumerate(zip(workers.fakes, case["workers"], strict=True)):
        for n, length in enumerate(told.get("running", [])):
            before = len(fake.received)
            fake.answer = workers.held(MANNERS["answers"])
            start = 1_000 * (at + 1) + 100 * n
            request = Request(list(range(start, start + length)), pin=fake.id)
            yield submit(entrance.ask, request)
            until(lambda fake=fake, before=before: len(fake.received) > before, "its arrival")
