"""Policies in Python: the frontend asks them, and does without when they fail."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from service import Process, until
from support_frontend import (
    CHAT,
    COMPLETIONS,
    Call,
    FakeEngine,
    FrontendProcess,
    ask,
    engines,
    prompt_of,
)

OWN = """
import json, math, os, time
from kvflash import Policy

class Patient(Policy):
    deadline_s = 30.0

class Last(Patient):
    def choose(self, request, candidates):
        return candidates[-1]

class Index(Patient):
    def choose(self, request, candidates):
        return 0

class Scores(Patient):
    def choose(self, request, candidates):
        return [None if one.active_requests else one.worker_id for one in candidates]

class Raises(Patient):
    def choose(self, request, candidates):
        raise RuntimeError("not today")

class Exits(Patient):
    def choose(self, request, candidates):
        raise SystemExit("not today")

class Sleeps(Policy):
    def choose(self, request, candidates):
        time.sleep(3_600)

class Spins(Policy):
    def choose(self, request, candidates):
        while True:
            pass

class Nonsense(Patient):
    def choose(self, request, candidates):
        count = len(candidates)
        answers = ["first", None, True, count, -1, [1.0], 1.5, [math.nan] * count]
        answers += [[10 ** 400] * count, object(), [None] * count]
        return answers[int(request.user)]

class Told(Patient):
    def choose(self, request, candidates):
        assert [one.index for one in candidates] == [0, 1]
        self.note("choose", request.model, request.user, request.prompt.decode())
        return [one.worker_id for one in candidates]

    def routed(self, request, candidate):
        self.note("routed", request.user, candidate.worker_id, request.session_key)

    def finished(self, ended):
        self.note("finished", ended.user, ended.worker_id, ended.input_tokens, ended.output_tokens)
        raise RuntimeError("and it goes on")

    def removed(self, worker_id, dp_rank):
        self.note("removed", worker_id, dp_rank)

    def note(self, *what):
        with open(os.environ["TOLD"], "a") as file:
            file.write(json.dumps(what) + "\\n")

class Needs(Policy):
    def __init__(self, something):
        pass

class Mute:
    pass

class Soon(Last):
    deadline_s = "soon"
"""
ANSWERS = 'kvflash_outside_policy_answers_total{outcome="%s"}'


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Callable[[str], FrontendProcess]]:
    """Makes frontends with a policy of the test's module."""
    (tmp_path / "mine.py").write_text(OWN)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    made: list[FrontendProcess] = []

    def make(name: str) -> FrontendProcess:
        env = {"PYTHONPATH": path, "TOLD": str(tmp_path / "told")}
        flags = ("--log-level", "warn", "--router-mode", f"python:mine:{name}")
        made.append(FrontendProcess(*flags, env=env))
        return made[-1]

    yield make
    for one in made:
        one.__exit__(None, None, None)


def answers(frontend: FrontendProcess, outcome: str) -> float:
    return frontend.metric(ANSWERS % outcome)


@pytest.mark.parametrize(("name", "chosen"), [("Last", 2), ("Index", 0), ("Scores", 2)])
def test_the_worker_that_it_chooses_gets_the_request(
    own: Callable[[str], FrontendProcess], name: str, chosen: int
) -> None:
    fakes = [FakeEngine("p") for _ in range(3)]
    frontend = own(name)
    with engines(frontend, *fakes):
        for n in range(6):
            assert ask(frontend.url, COMPLETIONS, prompt_of("p", n=n)).status == 200
            frontend.wait_idle()
        assert [len(fake.received) for fake in fakes] == [
            6 if at == chosen else 0 for at in range(3)
        ]
        assert answers(frontend, "followed") == 6
        policy = f"python:mine:{name}"
        assert frontend.http.get("/health")["router_policy"] == policy
        decision = frontend.explain(prompt_of("p"))
        assert (decision["policy"], decision["reason"]) == (policy, "highest_score")
        assert frontend.metric(f'kvflash_policy_info{{policy="{policy}",profile="document"}}') == 1


def test_a_worker_that_fails_is_not_chosen_again_for_the_request(
    own: Callable[[str], FrontendProcess],
) -> None:
    fakes = [FakeEngine("p"), FakeEngine("p"), FakeEngine("p", lambda _exchange: False)]
    frontend = own("Last")
    with engines(frontend, *fakes):
        assert ask(frontend.url, COMPLETIONS, prompt_of("p")).status == 200
        assert [len(fake.received) for fake in fakes] == [0, 1, 1]


@pytest.mark.parametrize(
    ("name", "outcome"),
    [("Raises", "raised"), ("Exits", "raised"), ("Sleeps", "late"), ("Spins", "late")],
)
def test_kv_chooses_where_it_fails_or_takes_too_long(
    own: Callable[[str], FrontendProcess], name: str, outcome: str
) -> None:
    fakes = [FakeEngine("p") for _ in range(2)]
    frontend = own(name)
    with engines(frontend, *fakes):
        calls = [Call(frontend.url, COMPLETIONS, prompt_of("p", n=n)) for n in range(20)]
        assert {call.finish().status for call in calls} == {200}
        # One that takes too long is not asked again before it is done.
        assert answers(frontend, outcome) + answers(frontend, "stuck") == 20
        assert answers(frontend, outcome) >= (20 if outcome == "raised" else 1)
        assert answers(frontend, "followed") == 0
        assert all(fake.received for fake in fakes)
        assert frontend.explain(prompt_of("p"))["reason"] != "highest_score"
        warned = [one for one in frontend.http.get("/health")["warnings"] if "policy" in one]
        assert len(warned) == 1 and "times in a row" in warned[0], warned
        assert ("has not returned within 5 ms" in warned[0]) == (outcome == "late")
        # Said once a minute, not for each request; what was raised with its trace.
        errors = frontend.process.errors
        line = "the policy gave no decision; kv decides instead"
        until(lambda: line in "".join(errors), "the line in the log")
        said = "".join(errors)
        assert said.count(line) == 1, said
        assert said.count(": not today") == (1 if outcome == "raised" else 0)


def test_kv_chooses_where_the_answer_is_nonsense(own: Callable[[str], FrontendProcess]) -> None:
    fakes = [FakeEngine("p") for _ in range(2)]
    frontend = own("Nonsense")
    with engines(frontend, *fakes):
        for n in range(11):
            body = {**prompt_of("p"), "user": str(n)}
            assert ask(frontend.url, COMPLETIONS, body).status == 200, n
            assert answers(frontend, "nonsense") == n + 1
        said = "one of 2 candidates, its index, or a score for each, not all None, got 'first'"
        until(lambda: said in "".join(frontend.process.errors), "the line in the log")


def test_it_is_told_what_becomes_of_requests(
    own: Callable[[str], FrontendProcess], tmp_path: Path
) -> None:
    fakes = [FakeEngine("p") for _ in range(2)]
    frontend = own("Told")

    def told() -> list[Any]:
        text = (tmp_path / "told").read_text() if (tmp_path / "told").exists() else ""
        return [json.loads(line) for line in text.splitlines()]

    with engines(frontend, *fakes):
        body = {"model": "p", "messages": [{"role": "user", "content": "hello"}], "user": "me"}
        answer = ask(frontend.url, CHAT, body, headers={"x-session-key": "k"})
        assert answer.status == 200
        until(lambda: len(told()) == 3, "all three")
        choose, routed, finished = told()
        assert choose == ["choose", "p", "me", "hello"]
        assert routed == ["routed", "me", answer.worker, "k"]
        assert finished[:3] == ["finished", "me", answer.worker]
    until(lambda: len(told()) == 5, "both workers to go")
    assert {one[0] for one in told()[3:]} == {"removed"}


def test_what_is_no_policy_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path}
    for name, why in (
        ("python:mine", "must be python:module:Class"),
        (
            "python:elsewhere:Last",
            "No module named 'elsewhere'; add the folder that contains it to",
        ),
        ("python:mine:First", "AttributeError"),
        ("python:mine:Needs", "TypeError"),
        ("python:mine:Mute", "has no method choose"),
        ("python:mine:Soon", "python:mine:Soon: Soon.deadline_s must be a number of seconds"),
    ):
        for service in ("frontend", "router"):
            process = Process(f"kvflash.{service}", "--port", "0", "--router-mode", name, env=env)
            try:
                assert process.popen.wait(60) == 2
            finally:
                process.close()
            errors = "".join(process.errors)
            assert "--router-mode" in errors and why in errors, errors
