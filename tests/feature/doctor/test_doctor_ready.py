"""The doctor about frontends and routers that refuse requests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvflash.ask import Answer
from kvflash.doctor import checks
from kvflash.doctor.app import main
from kvflash.router import RouterService
from support_frontend import COMPLETIONS, FakeEngine, Frontend, ask, engines, prompt_of

Findings = list[dict[str, str]]


def findings_of(url: str, capsys: pytest.CaptureFixture[str]) -> Findings:
    status = main([url, "--json", "--timeout", "5"])
    found: Findings = json.loads(capsys.readouterr().out)["findings"]
    assert status == any(one["level"] == "FAIL" for one in found)
    return found


def only(findings: Findings, check: str) -> dict[str, Any]:
    (found,) = (one for one in findings if one["check"] == check)
    return found


def test_a_frontend_that_still_waits_for_workers(capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine("m")
    with Frontend("--min-initial-workers", "2") as frontend, engines(frontend, engine):
        assert ask(frontend.url, COMPLETIONS, prompt_of("m")).status == 503
        ready = only(findings_of(frontend.url, capsys), "ready")
        assert ready["level"] == "FAIL"
        assert ready["seen"].startswith("GET /ready: starting: 1 of the 2 workers")
        assert "--min-initial-workers" in ready["fix"]
        with engines(frontend, FakeEngine("m")):
            assert only(findings_of(frontend.url, capsys), "ready")["level"] == "ok"


def test_a_router_that_still_waits_for_workers(capsys: pytest.CaptureFixture[str]) -> None:
    with RouterService(host="127.0.0.1", port=0, min_initial_workers=2) as router:
        router.call("POST", "/workers", {"worker_id": 1, "model_name": "m"})
        ready = only(findings_of(router.url, capsys), "ready")
        assert (ready["level"], ready["code"]) == ("FAIL", "starting")
        assert ready["seen"].startswith("GET /ready: starting: 1 of the 2 workers")
        assert "--min-initial-workers" in ready["fix"]
        router.call("POST", "/workers", {"worker_id": 2, "model_name": "m"})
        assert only(findings_of(router.url, capsys), "ready")["level"] == "ok"


def test_a_router_that_stops_has_all_its_workers() -> None:
    body = {"ready": False, "code": "stopping", "reason": "the router is shutting down"}
    answer = Answer(status=503, body=json.dumps(body).encode())
    (found,) = checks.check_ready("http://r", answer, "register the missing workers")
    assert (found.level, found.code) == ("FAIL", "stopping")
    assert found.seen == "GET /ready: the router is shutting down"
    assert "start it again" in found.fix


@pytest.mark.parametrize(
    ("answer", "fix"),
    [
        (Answer(error="TimeoutError: timed out"), "the message says why"),
        (Answer(error="the certificate is not trusted here", fix="renew it"), "renew it"),
        (Answer(status=401, body=b'{"error": "a key is needed"}'), "the message says why"),
        (Answer(status=503, body=b'{"reason": "something new"}'), "the reason says it"),
    ],
)
def test_without_an_answer_no_reason_is_promised(answer: Answer, fix: str) -> None:
    (found,) = checks.check_ready("http://f", answer, "the reason says it")
    assert (found.level, found.fix) == ("FAIL", fix)


def test_workers_that_are_all_draining(capsys: pytest.CaptureFixture[str]) -> None:
    with Frontend() as frontend, engines(frontend, FakeEngine("m"), FakeEngine("m")) as (one, two):
        for worker in (one, two):
            answer = frontend.http.call("PATCH", f"/workers/{worker}", {"state": "draining"})
            assert answer[0] == 200
        findings = findings_of(frontend.url, capsys)
        bad = [one for one in findings if one["level"] != "ok" and one["check"] != "events"]
        assert [(f["level"], f["check"]) for f in bad] == [
            ("FAIL", "ready"),
            ("warn", "draining"),
            ("warn", "draining"),
        ]
        assert bad[0]["seen"] == "GET /ready: all healthy decode workers are draining"
        assert [f["fix"] for f in bad] == [
            "kvflash workers resume URL ID brings one back: requests are refused until then",
            f"kvflash workers resume {frontend.url} {one}",
            f"kvflash workers resume {frontend.url} {two}",
        ]
        tokens = [f["seen"] for f in findings if f["check"] == "tokens"]
        assert len(tokens) == 2
        assert all(t.startswith("not compared: POST /v1/completions: 503 no ") for t in tokens)


def test_a_frontend_without_the_prefill_worker_that_it_needs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    frontend = Frontend("--enforce-disagg", "always")
    with frontend, engines(frontend, FakeEngine("m")):
        findings = findings_of(frontend.url, capsys)
        assert [f["check"] for f in findings if f["level"] == "FAIL"] == ["ready"]
        assert "no prefill worker is healthy" in only(findings, "ready")["seen"]
        assert "start or repair a prefill worker" in only(findings, "ready")["fix"]
        assert only(findings, "tokens")["level"] == "ok"
