"""``kvflash replay``: its traces, what it sends and when, and its report."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from signal import SIGINT
from typing import Any

import pytest
from aiohttp import web

from kvflash.errors import ConfigError
from kvflash.replay.app import main, report_of
from kvflash.replay.send import Result, send
from kvflash.replay.trace import MOONCAKE_BLOCK, Call, read_trace


def trace(folder: Path, *lines: Any) -> str:
    path = folder / "trace.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(text + "\n" for text in texts))
    return str(path)


def test_every_form_of_a_line(tmp_path: Path) -> None:
    calls = read_trace(trace(
        tmp_path,
        {"timestamp": 1500, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3},
        "",
        {"timestamp": 1000, "prompt": "Hi", "model": "m", "output_length": 0},
        {"at": 4, "token_ids": [1, 2]},
    ))  # fmt: skip
    assert calls == [
        Call(at_s=0.0, path="/v1/completions",
             given={"max_tokens": 1, "model": "m", "prompt": "Hi"}),
        Call(at_s=0.5, path="/v1/chat/completions",
             given={"max_tokens": 3, "messages": [{"role": "user", "content": "Hi"}]}),
        Call(at_s=3.0, path="/v1/completions", given={"max_tokens": 16, "prompt": [1, 2]}),
    ]  # fmt: skip
    path = trace(tmp_path, *({"at": n, "prompt": "x"} for n in range(5)))
    assert len(read_trace(path, limit=2)) == 2


def test_equal_hash_ids_are_equal_tokens(tmp_path: Path) -> None:
    one, two = (
        call.body["prompt"]
        for call in read_trace(trace(
            tmp_path,
            {"timestamp": 0, "input_length": 700, "hash_ids": [4, 5]},
            {"timestamp": 1, "input_length": 2 * MOONCAKE_BLOCK, "hash_ids": [4, 6]},
        ))
    )  # fmt: skip
    assert (len(one), len(two)) == (700, 1024)
    assert one[:MOONCAKE_BLOCK] == two[:MOONCAKE_BLOCK]
    assert one[MOONCAKE_BLOCK:] != two[MOONCAKE_BLOCK:700]
    assert all(1_000 <= token < 30_000 for token in one + two)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", ":2: is not JSON: "),
        ("[1]", ":2: must be a JSON object, got [1]"),
        ({"at": 1}, ":2: needs messages, prompt, token_ids, or hash_ids with input_length; got at"),
        ({"prompt": "x"}, ":2: needs a time: timestamp in milliseconds, or at in seconds"),
        ({"at": "now", "prompt": "x"}, ":2: at must be a number of at least 0, got 'now'"),
        ({"at": -1, "prompt": "x"}, ":2: at must be a number of at least 0, got -1"),
        ({"at": 1e300, "prompt": "x"}, ":2: at must be less than 1e+15, got 1e+300"),
        ({"at": 1, "prompt": "x", "max_tokens": None}, ":2: max_tokens must be a number"),
        (
            {"at": 0, "token_ids": ["a"]},
            ":2: token_ids must be a list of integers of at least 0, got ['a']",
        ),
        ({"at": 0, "token_ids": "a"}, ":2: token_ids must be a list of integers"),
        ({"at": 0, "token_ids": [-1]}, ":2: token_ids must be a list of integers"),
        ({"at": 0, "token_ids": [1, True]}, ":2: token_ids must be a list of integers"),
        ({"at": 0, "prompt": None}, ":2: prompt must be text or a list of token ids, got None"),
        ({"at": 1, "hash_ids": [1], "input_length": 513}, ":2: input_length must be in 1..=512"),
        ({"at": 1, "hash_ids": 7, "input_length": 5}, ":2: input_length must be in 1..=512"),
    ],
)
def test_a_wrong_line_is_named(line: Any, told: str, tmp_path: Path) -> None:
    path = trace(tmp_path, {"at": 0, "prompt": "x"}, line)
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}{told}")


def test_a_file_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, told in (("/nope", "can't be read: No such file"), (trace(tmp_path), "no request")):
        assert main(["http://127.0.0.1:1", path]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"kvflash replay: error: {path}: ") and told in line


def test_a_single_request_is_not_a_plural(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = trace(tmp_path, {"at": 0, "prompt": "x", "model": "m"})
    assert main(["http://127.0.0.1:1", path]) == 1
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("1 request in ") and first.endswith(" s, 1 failed")
    assert second.startswith("  1 time: ")


def test_figures_are_of_answered_requests_and_percentiles_need_samples() -> None:
    good = [
        Result(first_s=n / 1000, total_s=n / 100, prompt_tokens=10, cached_tokens=5, worker="1:0")
        for n in range(1, 11)
    ]
    silent = Result(first_s=0.5, total_s=0.5, prompt_tokens=10)
    bad = Result(first_s=9.0, total_s=9.0, late_s=2.0, error="status 503: busy")
    report = report_of([*good, silent, bad], 1.5)
    assert (report["requests"], report["failed"], report["errors"]) == (
        12, 1, {"status 503: busy": 1},
    )  # fmt: skip
    assert (report["prompt_tokens"], report["cached_tokens"], report["reported"]) == (110, 50, 10)
    assert report["cached_percent"] == 50.0
    assert report["first_token_ms"] == {"p50": 6.0, "p90": 10.0, "p99": None, "max": 500.0}
    assert report["late_ms"]["max"] == 2000.0
    assert report["workers"] == {"1:0": 10}
    nothing = report_of([bad], 1.0)
    assert nothing["cached_percent"] is nothing["first_token_ms"]["max"] is None


@asynccontextmanager
async def service(answer: Any) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def replayed(answer: Any, count: int, **options: Any) -> list[Result]:
    calls = [
        Call(at_s=n / 50, path="/v1/completions", given={"prompt": f"{n}"}) for n in range(count)
    ]
    settings = {"model": "m", "speed": 2.0, "timeout_s": 60.0, "in_flight_max": 10, **options}
    async with service(answer) as url:
        return await send(url, calls, **settings)


def test_what_is_sent_and_what_comes_back_is_noted() -> None:
    bodies = []

    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        bodies.append(body)
        if body["prompt"] == "1":
            return web.Response(status=503, text="all\nbusy")
        response = web.StreamResponse(headers={"x-kvflash-worker": "7:0"})
        await response.prepare(request)
        usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}
        parts = [{"choices": [{"text": "a"}]}, {"choices": [], "usage": usage}]
        if body["prompt"] == "2":
            parts = [{"error": {"message": "broken"}}]
        for part in parts:
            await response.write(f"data: {json.dumps(part)}\n\n".encode())
        if body["prompt"] != "3":
            await response.write(b"data: [DONE]\n\n")
        return response

    good, busy, broken, short = asyncio.run(replayed(answer, 4))
    assert all(body["model"] == "m" and body["stream"] for body in bodies)
    assert all(body["stream_options"] == {"include_usage": True} for body in bodies)
    assert (good.error, good.worker) == (None, "7:0")
    assert (good.prompt_tokens, good.cached_tokens) == (9, 4)
    assert good.first_s is not None and 0 < good.first_s <= good.total_s
    assert busy.error == "status 503: all busy"
    assert broken.error == '{"message": "broken"}'
    assert short.error == "the answer ended before [DONE]"


@pytest.mark.parametrize(
    "part",
    [
        {"usage": {"prompt_tokens": [1]}},
        {"usage": {"prompt_tokens": 1e999}},
        {"usage": [1]},
        {"usage": {"prompt_tokens_details": {"cached_tokens": {}}}},
        5,
        [],
        "[" * 50_000,
    ],
)
def test_an_odd_answer_is_one_failed_request(part: Any) -> None:
    async def answer(request: web.Request) -> web.Response:
        told = part if isinstance(part, str) else json.dumps(part)
        odd = told if (await request.json())["prompt"] == "0" else "{}"
        return web.Response(body=f"data: {odd}\n\ndata: [DONE]\n\n".encode())

    odd, good = asyncio.run(replayed(answer, 2))
    assert odd.error is not None and odd.error.split(":")[0].endswith("Error")
    assert good.error is None


def test_an_event_may_be_long_and_not_deep() -> None:
    long = json.dumps({"choices": [{"text": "a", "prompt_token_ids": [100_000] * 200_000}]})

    async def answer(request: web.Request) -> web.Response:
        is_long = (await request.json())["prompt"] == "0"
        event = long if is_long else "[" * 100_000
        return web.Response(body=f"data: {event}\n\ndata: [DONE]\n\n".encode())

    good, deep = asyncio.run(replayed(answer, 2))
    assert len(long) > 1 << 20
    assert (good.error, good.first_s is not None) == (None, True)
    assert deep.error is not None and deep.error.startswith("RecursionError")


# A shell starts what runs in its background with the interrupt ignored, and so do the tests then.
INTERRUPTIBLE = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("kvflash.replay", run_name="__main__")
"""


def test_an_interrupted_replay_reports_what_was_answered(tmp_path: Path) -> None:
    path = trace(tmp_path, *({"at": n / 50, "prompt": f"{n}", "model": "m"} for n in range(3)))

    async def check() -> None:
        is_asked, is_over = asyncio.Event(), asyncio.Event()

        async def answer(request: web.Request) -> web.Response:
            if (await request.json())["prompt"] != "0":
                is_asked.set()
                await is_over.wait()
            return web.Response(text="data: [DONE]\n")

        async with service(answer) as url:
            replaying = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", INTERRUPTIBLE, url, path, "--json", "--max-in-flight=1"),
                stdout=PIPE,
                stderr=PIPE,
            )
            await is_asked.wait()
            replaying.send_signal(SIGINT)
            out, errors = await replaying.communicate()
            is_over.set()
        assert replaying.returncode == 130
        assert json.loads(out)["requests"] == 1
        assert errors.decode() == ("replay: interrupted; the report leaves out 2 of 3 requests\n")

    asyncio.run(asyncio.wait_for(check(), 60))


def test_without_room_requests_are_late_and_are_not_lost() -> None:
    running: list[int] = []

    async def answer(_: web.Request) -> web.Response:
        running.append(1)
        assert len(running) == 1
        await asyncio.sleep(0.05)
        running.pop()
        return web.Response(text="data: [DONE]\n")

    results = asyncio.run(replayed(answer, 3, in_flight_max=1))
    assert [one.error for one in results] == [None] * 3
    assert results[0].late_s < results[2].late_s and results[2].late_s > 0.05


def test_requests_are_sent_at_their_times_over_the_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, float]] = []

    async def ask(_session: Any, _url: str, call: Call, *_: Any) -> None:
        # Here and not in a server, because connections made at once may overtake each other.
        sent.append((call.given["prompt"], time.monotonic()))

    monkeypatch.setattr("kvflash.replay.send._ask", ask)
    began_s = time.monotonic()
    results = asyncio.run(replayed(ask, 6))
    assert [prompt for prompt, _ in sent] == list("012345")
    # The last is due after 5 / 50 / 2 seconds, and none is ever early.
    assert all(at_s - began_s >= n / 50 / 2 for n, (_, at_s) in enumerate(sent))
    assert all(one.late_s >= 0 for one in results)
