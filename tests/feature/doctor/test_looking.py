"""``kvflash workers`` and ``kvflash explain``, asked of canned answers over real HTTP."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from kvflash.ask import parse_url
from kvflash.doctor.app import main as doctor
from kvflash.doctor.app import parse_args as parse_doctor
from kvflash.explain import CANDIDATES_MAX, lines_of
from kvflash.explain import main as explain
from kvflash.table import table
from kvflash.workers import main as workers

LISTENER = {"status": "active"}
OF_FRONTEND = [
    {"id": 1, "url": "http://a:8000", "healthy": True, "last_error": None, "model": "m",
     "serves": ["m"], "role": "decode", "capacity_blocks": 100, "blocks": 6, "requests": 3,
     "listeners": [LISTENER]},
    {"id": 12, "url": "http://b:8000", "healthy": False, "last_error": "timed\x1b[31m out",
     "model": "m", "serves": [], "role": "decode", "capacity_blocks": None, "blocks": 0,
     "requests": 0, "listeners": [LISTENER, {"status": "connecting"}]},
]  # fmt: skip
OF_ROUTER = [
    {"worker_id": 7, "url": "http://gpu", "model_name": "m", "tenant_id": "default",
     "is_busy": True, "blocks": 4, "ranks": [{"active_requests": 2, "listener": None},
                                             {"active_requests": 3, "listener": LISTENER}]},
]  # fmt: skip
OF_INDEXER = [
    {"instance_id": 1, "status": "active", "trust": {"state": "exact"}, "model_name": "m",
     "tenant_id": "default", "blocks": 6, "listeners": {"0": LISTENER}},
]  # fmt: skip
DECISION = {
    "model": "m", "policy": "auto", "worker": "2:0", "reason": "lowest_cost", "isl_tokens": 96,
    "block_size": 16, "request_blocks": 6, "because": "95 tokens less prefill",
    "expected_cached_tokens": 80,
    "candidates": [
        {"worker": "1:0", "cost": 100.14, "price": {"queue": 0.0, "prefill": 96.14},
         "overlap_blocks": 0, "prefill_tokens": 96, "active_requests": 1, "is_busy": False,
         "trust": {"state": "degraded", "reasons": [{"code": "no_events_yet"}]}},
        {"worker": "2:0", "cost": 5.0, "price": {"queue": 4.0, "prefill": 1.0},
         "overlap_blocks": 6, "prefill_tokens": 0, "active_requests": 0, "is_busy": False},
        {"worker": "3:0", "cost": 1.0, "price": {"queue": 0.0, "prefill": 1.0},
         "overlap_blocks": 6, "prefill_tokens": 0, "active_requests": 9, "is_busy": True,
         "trust": "degraded"},
    ],
}  # fmt: skip


class Service:
    """Answers by path and keeps what it was asked."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, Any]] = {}
        self.bodies: list[Any] = []
        self.missing = ""
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, body = service.answers.get(self.path, (404, {"error": "no such path"}))
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                if service.missing:
                    self.send_header("x-kvflash-missing", service.missing)
                self.end_headers()
                self.wfile.write(data)

            def do_POST(self) -> None:
                size = int(self.headers["content-length"])
                service.bodies.append(json.loads(self.rfile.read(size)))
                self.do_GET()

            do_PATCH = do_POST  # noqa: N815 - http.server names it so

            def log_message(self, *_: object) -> None:
                """Be quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_columns_are_aligned() -> None:
    assert table([("A", "NUMBER"), ("long", 1), (None, 20.5)]) == [
        "A     NUMBER",
        "long       1",
        "        20.5",
    ]


# -- workers


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        (
            OF_FRONTEND,
            [
                "WORKER URL MODEL ROLE STATE SENT BLOCKS EVENTS NOTE",
                "1 http://a:8000 m decode healthy 3 6/100 active",
                "12 http://b:8000 m decode unhealthy 0 0 active, connecting timed [31m out",
            ],
        ),
        (
            OF_ROUTER,
            [
                "WORKER URL MODEL TENANT STATE RUNNING BLOCKS EVENTS",
                "7 http://gpu m default busy 5 4 active",
            ],
        ),
        (
            OF_INDEXER,
            [
                "WORKER MODEL TENANT STATE BLOCKS EVENTS TRUST",
                "1 m default active 6 active exact",
            ],
        ),
        ([], ["no workers; POST /workers adds one"]),
    ],
)
def test_the_workers_of_every_service_are_a_table(
    service: Service, answer: Any, wanted: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    service.answers = {"/workers": (200, answer), "/health": (200, b"")}
    assert workers([service.url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [" ".join(line.split()) for line in lines] == wanted


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ("http://localhost:8000/v1", "http://localhost:8000"),
        ("localhost:8000/v1/", "http://localhost:8000"),
        ("https://gateway/llm/v1", "https://gateway/llm"),
        ("https://gateway/v1/llm", "https://gateway/v1/llm"),
        ("http://v1", "http://v1"),
        ("http://localhost/api-v1", "http://localhost/api-v1"),
    ],
)
def test_the_base_url_of_clients_is_taken(given: str, asked: str) -> None:
    assert parse_url(given) == asked


def test_a_strange_health_hides_no_workers(
    service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    service.answers = {"/workers": (200, OF_FRONTEND), "/health": (200, {"warnings": 1})}
    assert workers([service.url]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_json_is_the_answer_itself(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    service.answers = {"/workers": (200, b'[ {"x":1} ]')}
    assert workers([service.url, "--json"]) == 0
    assert capsys.readouterr().out == '[ {"x":1} ]\n'


@pytest.mark.parametrize(("missing", "is_hinted"), [("entry", False), ("path", True), ("", True)])
def test_only_a_path_that_is_missing_makes_the_address_doubtful(
    service: Service, missing: str, is_hinted: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    service.missing = missing
    service.answers = {"/workers": (404, {"error": 'no worker "Not Found"'})}
    assert workers([service.url]) == 1
    hint = "; does a kvflash frontend or router run there?"
    assert (hint in capsys.readouterr().err) == is_hinted


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ((404, {"error": "no such path"}), "/workers: 404 no such path"),
        ((500, {"error": {"message": "broken"}}), "/workers: 500 broken"),
        ((200, b"<html>"), "/workers: the answer is not JSON; is this a kvflash service?"),
        ((200, {"a": 1}), "GET /workers: the answer is not a list of workers"),
        ((200, [{"a": 1}]), "GET /workers: the answer is not a list of workers"),
        ((200, [1]), "GET /workers: the answer is not a list of workers"),
        (
            (200, [{"worker_id": 1, "ranks": [3]}]),
            "the answer is not a list of workers; --json prints it",
        ),
    ],
)
def test_what_is_no_service_is_refused_in_one_line(
    service: Service, answer: Any, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    service.answers = {"/workers": answer}
    assert workers([service.url]) == 1
    out = capsys.readouterr()
    (line,) = out.err.splitlines()
    assert line.startswith("kvflash workers: error: ") and told in line
    assert out.out == ""


def test_workers_are_drained_and_resumed(
    service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    service.answers = {"/workers/3": (200, {"state": "draining", "in_flight": 2})}
    assert workers(["drain", service.url, "3"]) == 0
    assert capsys.readouterr().out == "worker 3: draining, 2 requests in flight\n"
    service.answers = {"/workers/3": (200, {"state": "active", "in_flight": 1})}
    assert workers(["resume", service.url, "3"]) == 0
    assert capsys.readouterr().out == "worker 3: active, 1 request in flight\n"
    assert service.bodies == [{"state": "draining"}, {"state": "active"}]
    assert workers(["drain", service.url, "4"]) == 1
    assert "PATCH " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        workers(["drain", service.url])
    assert "WORKER" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["drian"], "did you mean 'drain'?"),
        (["resum", "http://a", "1"], "did you mean 'resume'?"),
        (["lst", "a:1"], "did you mean 'list'?"),
        (["frobnicate", "http://a", "1"], "the commands are list, drain, resume"),
    ],
)
def test_an_unknown_command_is_no_address(
    argv: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        workers(argv)
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert f"error: unknown command {argv[0]!r}; {hint}" in told
    assert len(told.splitlines()) == 2


def test_a_drain_waits_until_nothing_is_in_flight(
    service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = {"state": "draining", "in_flight": 0}
    service.answers = {"/workers/3": (200, entry)}
    assert workers(["drain", service.url, "3", "--wait", "60"]) == 0
    entry["in_flight"] = 1
    assert workers(["drain", service.url, "3", "--wait", "0.01"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "worker 3: draining, 1 request in flight"


def test_the_table_shows_who_is_draining(
    service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    draining = {"state": "draining", "in_flight": 4}
    service.answers = {
        "/workers": (200, [OF_FRONTEND[0] | draining, OF_FRONTEND[1] | draining]),
        "/health": (200, {}),
    }
    assert workers(["list", service.url]) == 0
    out = capsys.readouterr().out
    assert "  draining (4 in flight)" in out and "  unhealthy, draining (4 in flight)" in out


def test_warnings_stand_below_the_workers_and_say_the_reasons(
    service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = {"worker": "1:0", "message": "worker 1:0 reuses nothing", "fix": "start it anew"}
    warnings = ["worker 1:0 reuses nothing. Fix: start it anew", "another"]
    health = {"reasons": [reason], "warnings": warnings}
    service.answers = {"/workers": (200, OF_FRONTEND), "/health": (503, health)}
    assert workers([service.url]) == 0
    told = capsys.readouterr().out.splitlines()[3:]
    assert told == [f"warning: {text}" for text in warnings]


def test_an_address_where_nothing_runs(capsys: pytest.CaptureFixture[str]) -> None:
    for command, argv in ((workers, []), (explain, ["r-1"])):
        assert command(["http://127.0.0.1:1", *argv]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert "http://127.0.0.1:1/w" in line
        assert line.endswith("Connection refused; does the service run there?")
        assert command(["ftp://x", *argv]) == 2
        assert "URL must be http://HOST" in capsys.readouterr().err


def test_the_key_s_file_is_also_named_by_a_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVFLASH_SERVICE_KEY_FILE", "/nope")
    for command, argv in ((workers, []), (explain, ["r-1"])):
        assert command(["http://127.0.0.1:1", *argv]) == 2
        told = "error: --service-key-file /nope: can't be read: No such file or directory\n"
        assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("first-secret\nsecond-secret\n", "must be one key in one line of ASCII characters"),
        ("secret-für-alle\n", "must be one key in one line of ASCII characters"),
        (" \n", "is empty"),
    ],
)
def test_a_file_without_one_key_is_refused_and_not_shown(
    text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys"
    path.write_text(text, encoding="utf-8")
    for command, argv in ((workers, []), (explain, ["r-1"]), (doctor, [])):
        assert command(["http://127.0.0.1:1", *argv, "--service-key-file", str(path)]) == 2
        assert capsys.readouterr().err.endswith(f"--service-key-file {path}: {told}\n")


def test_a_variable_may_end_in_a_newline_but_not_have_two_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVFLASH_WORKER_API_KEY", "a-secret\n")
    assert parse_doctor(["http://127.0.0.1:1"]).worker_api_key == "a-secret"
    monkeypatch.setenv("KVFLASH_WORKER_API_KEY", "a-secret\nanother")
    assert doctor(["http://127.0.0.1:1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "environment variable KVFLASH_WORKER_API_KEY: must be one key" in line
    assert "secret" not in line


def test_an_error_of_a_service_has_no_control_characters(
    service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    service.answers = {"/workers": (500, {"error": "red \x1b[31m\nalert"})}
    assert workers([service.url]) == 1
    assert capsys.readouterr().err.endswith("/workers: 500 red [31m alert\n")


# -- explain

FRONTEND = {"/health": (200, {"healthy_workers": 2}), "/explain": (200, DECISION)}
ROUTER = {"/health": (200, {"reservations": 0}), "/explain": (200, DECISION)}


def test_a_decision_is_readable(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    models = {"data": [{"id": "m"}, {"id": "adapter", "parent": "m"}]}
    service.answers = {**FRONTEND, "/v1/models": (200, models)}
    assert explain([service.url, "--prompt", "Hello"]) == 0
    assert service.bodies == [{"model": "m", "prompt": "Hello"}]
    assert capsys.readouterr().out.splitlines() == [
        "m: 96 prompt tokens (6 blocks of 16), policy auto",
        "worker 2:0: lowest cost (95 tokens less prefill)",
        "80 tokens are expected to come from its cache",
        "",
        "   WORKER   COST  QUEUE  PREFILL  CACHED  TO PREFILL  RUNNING  NOTE",
        "*  2:0       5.0    4.0      1.0       6           0        0",
        "   1:0     100.1    0.0     96.1       0          96        1  no events yet",
        "   3:0       1.0    0.0      1.0       6           0        9  busy, events degraded",
        "",
        "COST and its parts are tokens of prefill; CACHED is in blocks, TO PREFILL in tokens",
    ]
    assert explain([service.url, "--prompt", "Hello", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == DECISION
    # A policy that does not choose by the cost.
    candidates = [{"worker": "2:0", "cost": 5.0, "formula": "2:0: 1 + 4", "overlap_blocks": 6}]
    other = {**DECISION, "policy": "round-robin", "candidates": candidates}
    service.answers["/explain"] = (200, other)
    assert explain([service.url, "--prompt", "Hello"]) == 0
    said = capsys.readouterr().out
    assert "COST" not in said and "1 + 4" not in said and "CACHED" in said


def test_an_adapter_is_named_beside_its_model(
    service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    service.answers = {**FRONTEND, "/explain": (200, {**DECISION, "lora_name": "ada"})}
    assert explain([service.url, "--prompt", "Hello", "--model", "ada"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == "m (adapter ada): 96 prompt tokens (6 blocks of 16), policy auto"
    assert next(lines_of({**DECISION, "lora_name": None})).startswith("m: 96 prompt tokens")


def test_a_prompt_length_that_is_guessed_is_no_fact() -> None:
    unknown = {**DECISION, "prompt_source": "unknown", "isl_tokens": 11, "request_blocks": 0}
    guess = "m: about 11 prompt tokens (guessed from bytes: the tokens are not known, so cached"
    why = f"{guess} blocks do not count; kvflash_untokenized_requests_total says why), policy auto"
    assert next(lines_of(unknown)) == why
    # A policy that needs no tokens asks for none.
    by_turns = {**unknown, "policy": "round-robin"}
    assert next(lines_of(by_turns)) == f"{guess} blocks do not count), policy round-robin"


def test_one_block_is_no_blocks() -> None:
    first = next(lines_of({**DECISION, "isl_tokens": 16, "request_blocks": 1}))
    assert first == "m: 16 prompt tokens (1 block of 16), policy auto"
    first = next(lines_of({**DECISION, "isl_tokens": 1, "request_blocks": 0}))
    assert first == "m: 1 prompt token (0 blocks of 16), policy auto"


def test_predicted_blocks_and_a_policy_that_did_not_choose_are_shown() -> None:
    held = {"worker": "2:0", "cost": 1.0, "overlap_blocks": 4, "predicted_blocks": 6}
    candidates = [held, {**held, "worker": "1:0", "overlap_blocks": 6, "cost": 2.0}]
    decision = {
        "worker": "2:0",
        "model": "m",
        "policy": "kv",
        "instead_of": "python:mine:Own",
        "candidates": candidates,
    }
    lines = [*lines_of(decision)]
    assert lines[1].startswith("python:mine:Own gave no valid choice in time; ")
    heading, first, second, *_ = (line.split() for line in lines[4:])
    assert heading[2:4] == ["CACHED", "PREDICTED"]
    assert (first[3:5], second[2:4]) == (["4", "2"], ["6", "0"])


def test_draining_workers_and_who_was_sent_elsewhere_are_shown() -> None:
    chosen, other = DECISION["candidates"][1], DECISION["candidates"][0]
    passed_over = [
        {**other, "worker": "3:0", "cost": None, "price": None, "is_draining": True},
        {**other, "worker": "4:0", "cost": None, "price": None, "is_busy": True},
    ]
    diverted = {"from": 3, "by": "pin", "because": "draining"}
    decision = {**DECISION, "candidates": [*passed_over, other, chosen], "diverted": diverted}
    lines = [*lines_of(decision)]
    assert "pinned to 3, which is draining: another was chosen" in lines
    assert [" ".join(line.split()) for line in lines if ":0  " in line] == [
        "* 2:0 5.0 4.0 1.0 6 0 0",
        "1:0 100.1 0.0 96.1 0 96 1 no events yet",
        "3:0 - - - 0 96 1 draining, no events yet",
        "4:0 - - - 0 96 1 busy, no events yet",
    ]
    # By kv the cost of each is in blocks.
    candidates = [{**one, "cost": 6.0, "price": None} for one in decision["candidates"]]
    by_session = {**diverted, "by": "session"}
    of_kv = {**decision, "policy": "kv", "diverted": by_session, "candidates": candidates}
    lines = [*lines_of(of_kv)]
    assert "its session was at 3, which is draining: another was chosen" in lines
    assert any(line.split()[:2] == ["3:0", "6.0"] for line in lines)


def test_what_is_known_now_of_a_past_decision_is_marked(
    service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    now = {"trust": {"state": "degraded", "reasons": [{"code": "lost_batches"}]}}
    decision = {**DECISION, "candidates": [{"worker": "2:0", "cost": 5.0, "now": now}]}
    service.answers = {"/why/r-1": (200, {"request_id": "r-1", "decisions": [decision]})}
    assert explain([service.url, "r-1"]) == 0
    assert "now: lost batches" in capsys.readouterr().out


def test_a_file_in_place_of_a_request_id_is_recognised(
    service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = tmp_path / "request.json"
    body.write_text("{}")
    assert explain([service.url, str(body)]) == 1
    assert f"give it by --file {body}" in capsys.readouterr().err


def test_questions_have_the_form_of_the_service(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = tmp_path / "request.json"
    body.write_text('{"model": "x", "messages": []}')
    text = tmp_path / "prompt.txt"
    text.write_text("Hello\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    for answers, argv, wanted in (
        (FRONTEND, ["--tokens", "1,2, 3", "--model", "m"], {"model": "m", "prompt": [1, 2, 3]}),
        (FRONTEND, ["--file", str(body)], {"model": "x", "messages": []}),
        (FRONTEND, ["--file", str(body), "--model", "m"], {"model": "m", "messages": []}),
        (FRONTEND, ["--file", str(text), "--model", "m"], {"model": "m", "prompt": "Hello\n"}),
        (FRONTEND, ["--file", "-", "--model", "m"], {"model": "m", "prompt": "from a pipe"}),
        (ROUTER, ["--tokens", "[1,2]"], {"token_ids": [1, 2]}),
        (ROUTER, ["--tokens", "1", "--model", "m"], {"token_ids": [1], "model_name": "m"}),
    ):
        service.answers, service.bodies = answers, []
        assert explain([service.url, *argv]) == 0
        assert service.bodies == [wanted]


def test_the_path_of_another_api_is_named(
    service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = tmp_path / "request.json"
    body.write_text('{"model": "m", "messages": []}')
    asked = {"/explain?path=%2Fv1%2Fmessages": (200, DECISION)}
    service.answers = {"/health": FRONTEND["/health"], **asked}
    assert explain([service.url, "--file", str(body), "--path", "/v1/messages"]) == 0
    assert capsys.readouterr().out.startswith("m: 96 prompt tokens")
    service.answers = ROUTER
    assert explain([service.url, "--tokens", "1", "--path", "/v1/messages"]) == 2
    assert "--path works only with a frontend" in capsys.readouterr().err


def test_a_file_of_broken_json_is_no_text(
    service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = tmp_path / "request.json"
    body.write_text('{"model": "x", "messages": [}')
    service.answers = FRONTEND
    assert explain([service.url, "--file", str(body)]) == 2
    assert f"--file {body}: starts like JSON but is invalid" in capsys.readouterr().err
    assert service.bodies == []


@pytest.mark.parametrize(
    ("answers", "argv", "status", "told"),
    [
        (
            {"/health": (200, b"")},
            ["--prompt", "x"],
            1,
            "does not make decisions; give the URL of a",
        ),
        (ROUTER, ["--prompt", "x"], 2, "has no tokenizer: give --tokens"),
        (
            {**FRONTEND, "/v1/models": (200, {"data": [{"id": "a"}, {"id": "b"}]})},
            ["--prompt", "x"],
            2,
            "set --model: http://127.0.0.1:",
        ),
        (
            {
                **FRONTEND,
                "/v1/models": (200, {"data": []}),
                "/explain": (503, {"error": {"message": "no worker is registered"}}),
            },
            ["--prompt", "x"],
            1,
            "/explain: 503 no worker is registered",
        ),
        (
            {**FRONTEND, "/v1/models": (200, {"data": ["a"]})},
            ["--prompt", "x"],
            1,
            "/v1/models: the answer is not a list of models",
        ),
        (
            {**FRONTEND, "/explain": (404, {"error": {"message": 'model "x" is not served'}})},
            ["--prompt", "x", "--model", "x"],
            1,
            '/explain: 404 model "x" is not served',
        ),
        ({}, ["r-1"], 1, "/why/r-1: 404 no such path"),
        ({"/why/r-1": (200, [3])}, ["r-1"], 1, "the answer is not a decision; --json prints it"),
        ({"/why/r-1": (200, {"candidates": [3]})}, ["r-1"], 1, "the answer is not a decision"),
        (FRONTEND, ["--file", "/nope"], 2, "--file /nope: can't be read: No such file"),
    ],
)
def test_what_can_not_be_explained_is_said_in_one_line(
    service: Service, answers: Any, argv: list[str], status: int, told: str, *,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    service.answers = answers
    assert explain([service.url, *argv]) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kvflash explain: error: ") and told in line


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ([], "give one of --prompt, --tokens, --file or a request id; got nothing"),
        (["--prompt", "a", "--tokens", "1"], "got --prompt and --tokens"),
        (["r-1", "--prompt", "a"], "--prompt and a request id exclude each other"),
        (["r-1", "--model", "a"], "--model and a request id exclude each other"),
        (["r-1", "--path", "/v1/messages"], "--path and a request id exclude each other"),
        (["--tokens", "1,a"], "--tokens: must be token ids, separated by commas, got '1,a'"),
        (["--promt", "a"], "did you mean '--prompt'?"),
    ],
)
def test_bad_usage(argv: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        explain(["http://127.0.0.1:1", *argv])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_a_past_request_has_its_outcome(
    service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = {"outcome": "client_gone", "first_token_ms": 2, "ended_ms": 9, "cached_tokens": 16}
    decisions = [
        {**DECISION, "age_ms": 9_017, "outcome": "failed"},
        {**DECISION, "age_ms": 9_002, **ended},
        {**DECISION, "age_ms": 12, "model": "n", "isl_tokens": 7, "outcome": "running"},
    ]
    why = {"request_id": "a/b", "decisions": decisions}
    service.answers = {"/why/a%2Fb": (200, why)}
    assert explain([service.url, "a/b"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "request a/b"
    assert [line for line in lines if line.startswith("decision")] == [
        "decision 1 of 3, 9.017 s ago",
        "decision 2 of 3, 9.002 s ago",
        "decision 3 of 3, 0.012 s ago: another request, with another model and prompt length",
    ]
    assert [line for line in lines if line.startswith("outcome")] == [
        "outcome: failed",
        "outcome: client gone, first token after 2 ms, ended after 9 ms, 16 tokens came from the "
        "cache",
        "outcome: running",
    ]


def test_costs_without_parts_show_their_formula_and_many_candidates_are_cut() -> None:
    candidates = [
        {"worker": f"{n}:0", "cost": float(n), "formula": f"{n} = x"} for n in range(100, 0, -1)
    ]
    decision = {"worker": "77:0", "model_name": "m", "policy": "kv", "candidates": candidates}
    lines = [*lines_of(decision)]
    rows = [line for line in lines if ":0" in line]
    assert rows[1].startswith("*  77:0")
    assert rows[2].startswith("   1:0")
    assert len(rows) == CANDIDATES_MAX + 1
    assert f"... and {100 - CANDIDATES_MAX} more; --json has them" in lines
    assert "77 = x" in lines and "20 = x" not in lines
    assert lines[-1] == "CACHED is in blocks, TO PREFILL in tokens"


def test_both_halves_of_a_divided_request_are_shown() -> None:
    lines = [*lines_of({**DECISION, "prefill": {**DECISION, "worker": "1:0"}})]
    assert lines[0] == "prefill:" and lines[2].startswith("worker 1:0")
    at = lines.index("decode:")
    assert lines[at + 2].startswith("worker 2:0")
