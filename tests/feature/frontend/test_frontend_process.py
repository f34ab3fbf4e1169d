"""The frontend as a process: flags, environment, signals, exit status."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from service import Process, run_to_end, until
from support_frontend import (
    COMPLETIONS,
    Call,
    Exchange,
    FakeEngine,
    FrontendProcess,
    Mocker,
    Raw,
    answer_json,
    ask,
    engines,
    hang,
    prompt_of,
)


def start(*flags: str, **env: str) -> CompletedProcess[str]:
    return run_to_end("kvflash.frontend", *flags, env=env)


# -- flags and environment


def test_help_names_every_flag() -> None:
    done = start("--help")
    assert done.returncode == 0
    for flag in ("--worker", "--router-mode", "--max-body-bytes", "--drain-timeout", "--tokenizer"):
        assert flag in done.stdout
    assert "KVFLASH_" in done.stdout


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (("--router-mode", "fastest"), "--router-mode"),
        (("--port", "70000"), "--port"),
        (("--port", "x"), "--port"),
        (("--kv-overlap-score-weight", "-1"), "--kv-overlap-score-weight"),
        (("--kv-overlap-score-weight", "nan"), "--kv-overlap-score-weight"),
        (("--router-temperature", "inf"), "--router-temperature"),
        (("--kv-cache-block-size", "0"), "--kv-cache-block-size"),
        (("--max-body-bytes", "0"), "--max-body-bytes"),
        (("--max-body-bytes", "5 parsecs"), "--max-body-bytes"),
        (("--max-concurrent-requests", "0"), "--max-concurrent-requests"),
        (("--max-attempts", "0"), "--max-attempts"),
        (("--first-byte-timeout", "0"), "--first-byte-timeout"),
        (("--threads", "0"), "--threads"),
        (("--log-level", "loud"), "--log-level"),
        (("--tokenizer", "/nonexistent"), "/nonexistent"),
        (("--worker", "127.0.0.1:8000"), "http://host:port"),
        (("--worker", "http://127.0.0.1:1,evnts=tcp://h:1"), "evnts"),
        (("--worker", "http://127.0.0.1:1,dp=0"), "dp"),
        (("--worker", "http://127.0.0.1:1", "--worker", "http://127.0.0.1:1"), "already"),
        (("--host", "256.0.0.1"), "--host"),
        (("--nonsense",), "--nonsense"),
        (("--router", "kv"), "--router"),
    ],
)
def test_bad_flags_end_with_status_2_and_their_name(flags: tuple[str, ...], wanted: str) -> None:
    done = start("--port", "0", *flags) if "--port" not in flags else start(*flags)
    assert done.returncode == 2, done
    assert wanted in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = start("--host", "127.0.0.1", "--port", port)
    assert done.returncode == 2
    assert "--port" in done.stderr
    assert port in done.stderr


def test_a_discovery_that_can_not_be_ends_it() -> None:
    done = start("--port", "0", KVFLASH_DISCOVERY_DIR="/etc")
    assert (done.returncode, done.stdout) == (2, "")
    assert "python -m kvflash.frontend: error: discovery folder /etc must " in done.stderr


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("KVFLASH_ROUTER_MODE", "fastest"),
        ("KVFLASH_PORT", "x"),
        ("KVFLASH_MAX_BODY_BYTES", "-3"),
        ("KVFLASH_ROUTER_TEMPERATURE", "warm"),
        ("KVFLASH_LOG_FORMAT", "xml"),
        pytest.param(
            "KVFLASH_NO_ASSUME_KV_REUSE",
            "maybe",
        ),
    ],
)
def test_bad_environment_names_the_variable(name: str, value: str) -> None:
    # A bad host ends a process that would otherwise serve for ever.
    done = start("--port", "0", "--host", "256.0.0.1", **{name: value})
    assert done.returncode == 2
    assert name in done.stderr
    assert "Traceback" not in done.stderr


def test_environment_sets_flags_and_the_command_line_wins() -> None:
    env = {"KVFLASH_ROUTER_MODE": "round-robin", "KVFLASH_MAX_BODY_BYTES": "1k"}
    env["KVFLASH_WORKER"] = "http://127.0.0.1:9 http://127.0.0.1:10,id=7"
    with FrontendProcess("--max-body-bytes", "2k", env=env) as frontend:
        assert frontend.http.call("GET", "/health")[1]["router_policy"] == "round_robin"
        assert sorted(frontend.workers()) == [1, 7]
        got = ask(frontend.url, COMPLETIONS, b" " * 2_001)
        assert got.status == 413
        assert "2000 bytes" in got.json["error"]["message"]
        assert ask(frontend.url, COMPLETIONS, b" " * 1_500).status == 400


# -- the end


class Held:
    """An engine with a stream that continues on request."""

    def __init__(self) -> None:
        self.release = threading.Event()

    def __call__(self, exchange: Exchange) -> None:
        exchange.open_stream()
        exchange.chunk(b'data: {"n": 1}\n\n')
        self.release.wait(30)
        exchange.chunk(b'data: {"n": 2}\n\n')
        exchange.chunk(b"data: [DONE]\n\n")
        exchange.chunk(b"")


@contextlib.contextmanager
def serving(fake: FakeEngine, *flags: str) -> Iterator[FrontendProcess]:
    with FrontendProcess(*flags) as frontend, fake:
        frontend.add(fake.url)
        yield frontend


def is_refused(address: tuple[str, int]) -> bool:
    try:
        with socket.create_connection(address, timeout=5):
            return False
    except ConnectionError:
        return True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signal_lets_running_answers_finish(number: signal.Signals) -> None:
    held = Held()
    with serving(FakeEngine("end", held)) as frontend:
        call = Call(frontend.url, COMPLETIONS, prompt_of("end", stream=True))
        assert call.read_event() == b'data: {"n": 1}\n'
        frontend.process.popen.send_signal(number)
        until(lambda: is_refused(frontend.address), "new connections to be refused")
        assert frontend.process.popen.poll() is None
        held.release.set()
        answer = call.finish()
        assert answer.body == b'data: {"n": 2}\n\ndata: [DONE]\n\n'
        assert frontend.process.popen.wait(30) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once(number: signal.Signals) -> None:
    flags = ("--drain-timeout", "600", "--log-level", "info")
    with serving(FakeEngine("stuck", hang), *flags) as frontend:
        call = Call(frontend.url, COMPLETIONS, prompt_of("stuck"))
        until(lambda: frontend.metric("kvflash_requests_in_flight") == 1, "the request")
        frontend.process.popen.send_signal(number)
        until(lambda: is_refused(frontend.address), "new connections to be refused")
        frontend.process.popen.send_signal(number)
        assert frontend.process.popen.wait(30) == -number
        with pytest.raises((ConnectionError, OSError)):
            call.finish()
        frontend.process.close()
        [said] = [line for line in frontend.process.errors if number.name in line]
        assert "running requests get up to 600 s; a second signal ends it now" in said


def test_idle_connections_do_not_delay_the_end() -> None:
    with serving(FakeEngine("idle")) as frontend, Raw(frontend.address) as used:
        used.send(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert used.read_answer()[0] == 200
        assert frontend.process.terminate() == 0
        assert used.read_to_end() == b""


def test_connections_without_a_request_do_not_delay_the_end() -> None:
    with serving(FakeEngine("silent")) as frontend, Raw(frontend.address):
        frontend.http.call("GET", "/health")
        assert frontend.process.terminate() == 0


def test_drain_timeout_bounds_the_end() -> None:
    with serving(FakeEngine("stuck", hang), "--drain-timeout", "0.2") as frontend:
        call = Call(frontend.url, COMPLETIONS, prompt_of("stuck"))
        until(lambda: frontend.metric("kvflash_requests_in_flight") == 1, "the request")
        assert frontend.process.terminate() == 0
        with pytest.raises((ConnectionError, OSError)):
            call.finish()


def test_request_that_waits_at_the_signal_is_still_tried_elsewhere() -> None:
    started, die = threading.Event(), threading.Event()

    def first_dies(exchange: Exchange) -> bool:
        if started.is_set():
            return answer_json(exchange)
        started.set()
        die.wait(30)
        return False

    with contextlib.ExitStack() as stack:
        frontend = stack.enter_context(FrontendProcess())
        fakes = [stack.enter_context(FakeEngine("late", first_dies)) for _ in range(2)]
        for fake in fakes:
            frontend.add(fake.url)
        call = Call(frontend.url, COMPLETIONS, prompt_of("late"))
        assert started.wait(30)
        frontend.process.popen.send_signal(signal.SIGTERM)
        until(lambda: is_refused(frontend.address), "the stop")
        die.set()
        assert call.finish().status == 200
        assert [len(fake.received) for fake in fakes] == [1, 1]
        assert frontend.process.popen.wait(30) == 0


def test_signal_with_real_engines_and_their_events() -> None:
    with Mocker("--speedup-ratio", "5") as mocker:
        with FrontendProcess("--worker", mocker.spec()) as frontend:
            frontend.wait_healthy(1)
            body = {"model": "m", "prompt": "x" * 100, "max_tokens": 200, "stream": True}
            call = Call(frontend.url, COMPLETIONS, body)
            first = call.read_event()
            frontend.process.popen.send_signal(signal.SIGTERM)
            answer = call.finish()
            assert first.startswith(b"data: ")
            assert len(answer.events) == 199
            assert frontend.process.popen.wait(30) == 0
            assert frontend.process.errors == []
        mocker.wait_metric("vllm:num_requests_running", 0)


def test_connections_are_closed_behind_clients() -> None:
    with FrontendProcess() as frontend, engines(frontend, FakeEngine("fds")):
        folder = Path(f"/proc/{frontend.process.popen.pid}/fd")
        ask(frontend.url, COMPLETIONS, prompt_of("fds"))
        before = len(list(folder.iterdir()))
        for n in range(300):
            assert ask(frontend.url, COMPLETIONS, prompt_of("fds", n=n)).status == 200
        until(lambda: len(list(folder.iterdir())) <= before + 2, "the connections to be closed")


def test_flags_that_need_nats_say_so_in_the_log(run: Callable[..., Process]) -> None:
    flags = ("--router-reset-states", "--router-snapshot-threshold", "5")
    env = {"NATS_SERVER": "nats://127.0.0.1:1"}
    for module in ("kvflash.frontend", "kvflash.router"):
        process = run(module, "--port", "0", "--host", "127.0.0.1", *flags, env=env)
        process.ready()
        until(lambda p=process: sum("has no effect" in x for x in p.errors) == 3, "the warnings")
        for name in (flags[0], flags[1], "NATS_SERVER"):
            (line,) = (line for line in process.errors if f"{name} has no effect" in line)
            assert "WARN" in line and "add --event-plane nats" in line
