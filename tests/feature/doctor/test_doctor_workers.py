"""The doctor's findings from a frontend's answers about its workers."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from kvflash.ask import Answer
from kvflash.doctor import checks, workers
from kvflash.doctor.events import Contents, Heard, Replayed
from kvflash.doctor.finding import FAIL, OK, WARN

URL = "http://f:8000"
TOLD = Answer(status=200, body=b'data: {"nvext": {"token_ids": [1, 2]}}\n\ndata: [DONE]\n\n')
SILENT: dict[str, Any] = {"events": {"batches": 0}}
UNREPORTED = {"reported": None, "reported_tokens": 0}
REUSE = {"reported": True, "predicted_tokens": 640, "reported_tokens": 640, "trust": 1.0}


def entry(**fields: Any) -> dict[str, Any]:
    socket = {
        "dp_rank": 0,
        "endpoint": "tcp://e:5557",
        "replay_endpoint": "tcp://e:5657",
        "status": "active",
        "last_error": None,
        "last_sequence": 7,
        "events": {"batches": 8},
    }
    listener = {**socket, **fields.pop("listener", {})}
    base = {
        "id": 1,
        "url": "http://e:8000",
        "healthy": True,
        "last_error": None,
        "model": "m",
        "role": "decode",
        "loads": None,
        "block_size": 16,
        "engine_block_size": 16,
        "requests": 9,
        "listeners": [listener],
    }
    return {**base, **fields}


def found(reuse: Any = REUSE, replayed: Replayed | None = None, **fields: Any) -> dict[str, str]:
    """Level by check."""
    (worker,) = workers.workers_of(URL, [entry(**fields)])
    health = {"router_policy": "kv", "reuse": {"1:0": reuse, "11:0": {"reported": False}}}
    replays = {(1, 0): replayed or Replayed(has_answered=True, first=7)}
    findings = list(workers.check_worker(worker, health, replays, {}, 5.0))
    for finding in findings:
        assert bool(finding.fix) == (finding.level != OK) and finding.seen, finding
    return {finding.check: finding.level for finding in findings}


def parity(**forms: tuple[str, str | None]) -> list[tuple[str, str]]:
    record = {name: {"outcome": outcome, "why": why} for name, (outcome, why) in forms.items()}
    health = {"parity": {"m": {"0.32.0": {"compared_s_ago": 3, "forms": record}}}}
    findings = list(workers.check_parity(URL, health))
    assert all(one.subject == f"{URL} model m, engines 0.32.0" for one in findings)
    return [(finding.level, finding.seen) for finding in findings]


def test_tokens_that_are_not_the_engines_warn_by_form() -> None:
    assert parity(chat=("agrees", None), tools=("not compared", "no template")) == [
        (OK, "agrees: chat; not compared: tools"),
    ]
    how = "9 tokens here, 10 there, different from token 4 on"
    ((level, seen),) = parity(chat=("agrees", None), tools=("differs", how))
    assert level == WARN and "tools" in seen and how in seen and "engines render" in seen
    waits = {"parity": {"m": {"0.32.0": {"compared_s_ago": None, "forms": {}}}}}
    assert [one.level for one in workers.check_parity(URL, waits)] == [OK]
    assert list(workers.check_parity(URL, {})) == []


def test_a_worker_that_is_well() -> None:
    checks = ["healthy", "connected", "publishes", "replay", "reuse"]
    assert found() == dict.fromkeys(checks, OK)


@pytest.mark.parametrize(
    ("fields", "check", "level"),
    [
        ({"healthy": False, "last_error": "refused"}, "healthy", FAIL),
        ({"listener": {"status": "pending"}}, "connected", FAIL),
        ({"listener": SILENT, "reuse": UNREPORTED}, "publishes", WARN),
        ({"listener": {"events": {"batches": 1, "undecodable": 1}}}, "decodes", WARN),
        ({"listener": {"replay_endpoint": None}}, "replay", WARN),
        ({"replayed": Replayed()}, "replay", FAIL),
        ({"engine_block_size": 32}, "block size", FAIL),
        ({"engine_block_size": 32, "listener": {"status": "pending"}}, "block size", FAIL),
        ({"reuse": {"reported": False}}, "reuse", WARN),
        ({"reuse": {"reported": None}}, "reuse", OK),
        ({"reuse": {**REUSE, "reported_tokens": 0, "trust": 0.25}}, "reuse", WARN),
    ],
)
def test_each_fault_once(fields: dict[str, Any], check: str, level: str) -> None:
    assert found(**fields)[check] == level


def test_blocks_of_several_times_the_engines_size_are_no_fault() -> None:
    assert "block size" not in found(engine_block_size=8)


@pytest.mark.parametrize(
    ("fields", "level", "seen"),
    [
        ({"requests": 0}, OK, "no requests"),
        ({"requests": 1}, WARN, "its engine got 1 request"),
        ({"requests": 9, "failures": 7}, WARN, "its engine got 9 requests"),
        ({"requests": 9, "failures": 9}, OK, "may have answered none: failures 9"),
        # The engine ran before the frontend: prompts that it holds store nothing.
        ({"reuse": {**UNREPORTED, "reported_tokens": 256}}, OK, "reused 256 tokens"),
        ({"rank": 1}, OK, "another rank of its engine publishes"),
    ],
)
def test_silence_is_a_fault_only_if_answers_should_have_stored_blocks(
    fields: dict[str, Any], level: str, seen: str
) -> None:
    reuse = fields.pop("reuse", UNREPORTED)
    told = entry(**fields, listener=SILENT)
    if fields.get("rank"):
        told["listeners"].append({**told["listeners"][0], "dp_rank": 1, "events": {"batches": 8}})
    (worker,) = workers.workers_of(URL, [told])
    health = {"reuse": {"1:0": reuse}}
    findings = workers.check_worker(worker, health, {}, {}, 5.0)
    found = next(one for one in findings if one.check == "publishes")
    assert found.level == level and re.search(rf"{seen}\b", found.seen), found


def test_reuse_that_is_not_reported_says_what_to_check() -> None:
    (worker,) = workers.workers_of(URL, [entry()])
    health = {"reuse": {"1:0": {"reported": None, "requests": 25}}}
    (seen,) = (
        one.seen
        for one in workers.check_worker(worker, health, {}, {}, 5.0)
        if one.check == "reuse"
    )
    assert "no answer has reported reused tokens yet" in seen and "twice" not in seen
    assert "prefix caching" in seen and "--enable-prompt-tokens-details" in seen


def test_a_worker_that_only_its_service_reaches_is_a_warning() -> None:
    """As through kubectl port-forward: the cluster is well, and this host does not see it."""
    refused = "ConnectionRefusedError: [Errno 111] Connection refused"
    (worker,) = workers.workers_of(URL, [entry()])
    for unreached, level in ((refused, WARN), ("", FAIL)):
        findings = workers.check_worker(
            worker, {}, {(1, 0): Replayed()}, {}, 5.0, unreached=unreached
        )
        (replay,) = (one for one in findings if one.check == "replay")
        assert replay.level == level and "did not answer in 5 s" in replay.seen
        assert (refused in replay.seen) == bool(unreached)
        assert (replay.fix == checks.ELSEWHERE) == bool(unreached)
    # An answer that is wrong is one: the socket was reached.
    wrong = Replayed(has_answered=True)
    findings = workers.check_worker(worker, {}, {(1, 0): wrong}, {}, 5.0, unreached=refused)
    assert [one.level for one in findings if one.check == "replay"] == [FAIL]
    for fix in ("", "set SSL_CERT_FILE"):
        (tokens,) = workers.check_tokens(worker, TOLD, Answer(error=refused, fix=fix))
        assert (tokens.level, tokens.fix) == (WARN, fix or checks.ELSEWHERE)


def test_fixes_name_the_settings_of_the_service() -> None:
    (worker,) = workers.workers_of(URL, [entry(listener={"replay_endpoint": None})])
    (at_frontend,) = worker.listeners
    registered = {"instance_id": 1, "listeners": {"0": {**at_frontend.entry}}}
    (at_indexer,) = checks.listeners_of(URL, [registered])
    for listener, replay, events in (
        (at_frontend, "replay=tcp://HOST:PORT after its --worker, or as replay in", "events= of"),
        (at_indexer, "replay_endpoint in POST /register", "endpoint in POST /register"),
    ):
        (missing,) = checks.check_replay(listener, None, 5.0)
        assert replay in missing.fix and "--kv-events-config" in missing.fix
        for heard in (Heard(error="refused"), Heard(messages=1, malformed=1)):
            (unheard, *_) = checks.check_heard(listener, heard)
            assert events in unheard.fix
    assert "POST /workers" not in missing.fix


def test_one_stored_event_is_no_events() -> None:
    (listener,) = checks.listeners_of(
        URL, [{"instance_id": 1, "listeners": {"0": {"endpoint": "tcp://e:1", "trust": {}}}}]
    )
    for count, seen, of_adapters in (
        (1, "of 1 stored event 0 have an adapter", "1 of 1 stored event has a lora_id only"),
        (2, "of 2 stored events 0 have an adapter", "2 of 2 stored events have a lora_id only"),
    ):
        for contents, words in (
            (Contents(batches=1, stored=count), seen),
            (Contents(batches=1, stored=count, numbered_adapters=count), of_adapters),
        ):
            heard = Heard(messages=1, contents=contents)
            findings = checks.check_listener(listener, None, heard, 5.0)
            (identity,) = (one for one in findings if one.check == "identity")
            assert identity.seen.startswith(words)


@pytest.mark.parametrize("own", [8, 32, None])
@pytest.mark.parametrize("stored", [0, 1])
def test_events_of_another_block_size_fail_if_there_are_no_others(
    own: int | None, stored: int
) -> None:
    events = {"batches": 3, "block_size_mismatch": 2, "stored": stored}
    checked = found(engine_block_size=own, listener={"events": events})
    assert checked.get("block size") == (FAIL if own == 32 or not stored else None)


def test_a_fix_names_flags_that_may_not_be_given() -> None:
    (worker,) = workers.workers_of(URL, [entry(engine_block_size=32)])
    findings = workers.check_worker(worker, {}, {}, {}, 5.0)
    (size,) = (one for one in findings if one.check == "block size")
    assert size.fix.startswith("remove --kv-cache-block-size of the frontend, if given, and")


def test_reasons_fail_and_are_not_repeated_as_warnings() -> None:
    reason = {"code": "events_crossed", "worker": "1:0", "message": "worker 1:0 ...", "fix": "x"}
    told = {"code": "events_crossed", "worker": "1:0", "message": "in other words"}
    other = {"code": "policy", "message": "something else"}
    health = {"reasons": [reason], "causes": [told, other]}
    findings = [(one.level, one.code) for one in workers.check_reasons(URL, health)]
    assert findings == [(FAIL, "events_crossed"), (WARN, "policy")]


def test_warnings_of_an_older_version_are_told() -> None:
    """Such a frontend may run beside this one during an upgrade."""
    health = {"status": "healthy", "warnings": ["worker 1: given without events="]}
    (finding,) = workers.check_reasons(URL, health)
    assert (finding.level, finding.seen) == (WARN, "worker 1: given without events=")


def test_a_warning_has_the_service_s_fix() -> None:
    cause = {"code": "events_not_given", "message": "x", "fix": "give it"}
    (finding,) = workers.check_reasons(URL, {"causes": [cause]})
    assert finding.fix == "give it"
    # Of an empty one there is the manual.
    (finding,) = workers.check_reasons(URL, {"causes": [{"code": "newer", "message": "x"}]})
    assert finding.fix == 'see "What /health warns of" in docs/frontend.md'


def test_a_worker_that_is_down_is_one_finding() -> None:
    assert found(healthy=False, last_error="refused", listener={"status": "pending"}) == {
        "healthy": FAIL
    }


@pytest.mark.parametrize(
    ("last_error", "status", "fix"),
    [
        ("GET /health: client error (Connect): refused", None, "check that the engine runs"),
        ("GET /v1/models answered 401", 401, "give the frontend the engine's API key"),
        ("GET /health answered 508: leads back", 508, "check that the worker's URL is"),
        (None, None, "check that the engine runs"),
    ],
)
def test_an_unhealthy_worker_gets_the_fix_for_its_error(
    last_error: str | None, status: int | None, fix: str
) -> None:
    down = entry(healthy=False, last_error=last_error, last_status=status, listeners=[])
    (worker,) = workers.workers_of(URL, [down])
    (finding,) = workers.check_worker(worker, {}, {}, {}, 5.0)
    assert finding.seen == (last_error or "it has not been checked yet")
    assert finding.fix.startswith(fix)


def test_a_worker_s_own_findings_are_not_warnings_too() -> None:
    down = entry(healthy=False, last_error="refused", listeners=[])
    known = workers.workers_of(URL, [down, entry(id=2, listeners=[]), entry(id=3)])
    without = "worker 2: given without events=, so its cache is unknown"
    causes = [
        {"code": "worker_error", "worker": "1", "message": "worker 1: refused"},
        {"code": "events_not_given", "worker": "2", "message": without},
        {"code": "nothing_published", "worker": "3:0", "message": "worker 3:0: in other words"},
        {"code": "tokens_differ", "message": "what the check of parity says"},
        # No other check says what is wrong with a worker that answers.
        {"code": "worker_error", "worker": "2", "message": "worker 2: its card is wrong"},
        # Nor of one whose events would be in a stream, and that has no socket.
        {"code": "nothing_published", "worker": "2", "message": "worker 2: is silent"},
        {"code": "event_socket", "worker": "4:0", "message": "worker 4:0: has left"},
        {"message": "other"},
    ]
    health = {"router_policy": "auto", "causes": causes}
    found_by_code = [one.seen for one in workers.check_reasons(URL, health, known)]
    assert found_by_code == [
        "worker 2: its card is wrong", "worker 2: is silent", "worker 4:0: has left", "other"
    ]  # fmt: skip
    found = [
        (one.check, one.seen)
        for worker in known
        for one in workers.check_worker(worker, health, {}, {}, 5.0)
    ]
    # The first never answered: its sockets, if any, are not registered yet.
    assert ("healthy", "refused") in found
    assert [seen for check, seen in found if check == "events"] == [
        "given without events=, so its cache is unknown"
    ]


def test_tokens_are_compared() -> None:
    (worker,) = workers.workers_of(URL, [entry()])
    assert worker.is_http
    (runtime,) = workers.workers_of(URL, [entry(url="tcp://e:1", loads={})])
    assert not runtime.is_http
    assert workers.token_ids(TOLD) == [1, 2]
    assert workers.token_ids(Answer(status=503, body=b"{}")) is None
    answer = Answer(status=200, body=json.dumps({"tokens": [1, 2]}).encode())
    other = Answer(status=200, body=json.dumps({"tokens": [1, 3]}).encode())
    nothing = Answer(status=404, body=b"{}")
    for told, engine, level in [
        (TOLD, answer, OK),
        (TOLD, other, FAIL),
        (TOLD, nothing, OK),
        (Answer(status=200), answer, WARN),
    ]:
        (finding,) = workers.check_tokens(worker, told, engine)
        assert (finding.check, finding.level) == ("tokens", level)


def test_a_query_that_the_frontend_refuses_says_nothing_of_tokens() -> None:
    (worker,) = workers.workers_of(URL, [entry()])
    engine = Answer(status=200, body=b'{"tokens": [1]}')
    for status, level in ((503, OK), (401, WARN)):
        refused = Answer(status=status, body=b'{"error": {"message": "not now"}}')
        (finding,) = workers.check_tokens(worker, refused, engine)
        assert finding.level == level
        assert finding.seen == f"not compared: POST /v1/completions: {status} not now"
