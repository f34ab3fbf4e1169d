"""The load of running requests: generated blocks, and prompts in prefill."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from service import DEADLINE_S, Process, until
from support_frontend import COMPLETIONS, Call, Exchange, FakeEngine, Frontend, Typist, engines

BLOCK = 16


def body(**hints: Any) -> dict[str, Any]:
    return {
        "model": "m",
        "prompt": list(range(2 * BLOCK)),
        "stream": True,
        "nvext": {"agent_hints": hints},
    }


def blocks(frontend: Frontend, prefix: str = "kvflash") -> float:
    return frontend.metric(f'{prefix}_worker_active_blocks{{worker="1:0"}}')


def wait_blocks(frontend: Frontend, count: int) -> None:
    until(lambda: blocks(frontend) == count, f"{count} blocks")


def test_an_answer_grows_and_fades_towards_its_expected_end() -> None:
    typist = Typist()
    flags = ("--router-track-output-blocks", "--kv-cache-block-size", str(BLOCK))
    with Frontend(*flags) as frontend, engines(frontend, FakeEngine("m", typist)):
        call = Call(frontend.url, COMPLETIONS, body())
        typist.type(3 * BLOCK)
        wait_blocks(frontend, 2 + 3)
        typist.end.set()
        assert call.finish().status == 200
        frontend.wait_idle()
        wait_blocks(frontend, 0)

        typist.end.clear()
        call = Call(frontend.url, COMPLETIONS, body(osl=2 * BLOCK))
        typist.type(BLOCK)
        # Half of three, rounded.
        wait_blocks(frontend, 2)
        typist.type(BLOCK)
        wait_blocks(frontend, 0)
        typist.end.set()
        assert call.finish().status == 200
        frontend.wait_idle()


def test_generated_blocks_do_not_count_unless_asked_for() -> None:
    typist = Typist()
    flags = ("--kv-cache-block-size", str(BLOCK), "--metrics-prefix", "mine")
    with Frontend(*flags) as frontend, engines(frontend, FakeEngine("m", typist)):
        call = Call(frontend.url, COMPLETIONS, body())
        typist.type(3 * BLOCK)
        until(lambda: blocks(frontend, "mine") == 2, "the prompt's blocks")
        assert {name.partition("_")[0] for name in frontend.metrics()} == {"mine"}
        for _ in range(3 * BLOCK):
            assert call.read_event()
        assert blocks(frontend, "mine") == 2
        typist.end.set()
        assert call.finish().status == 200


def test_a_prompt_that_is_worked_on_counts_less_and_less() -> None:
    typist = Typist()
    name = 'kvflash_worker_active_prefill_tokens{worker="1:0"}'
    flags = ("--router-prefill-tokens-per-second", "16")
    with Frontend(*flags) as frontend, engines(frontend, FakeEngine("m", typist)):
        call = Call(frontend.url, COMPLETIONS, body())
        until(lambda: 0 < frontend.metric(name) < 2 * BLOCK, "a part of the prompt to be left")
        until(lambda: frontend.metric(name) == 0, "nothing of it to be left")
        typist.end.set()
        assert call.finish().status == 200


def test_how_fast_prompts_are_worked_on_is_learned_from_first_tokens() -> None:
    typist = Typist()
    left = 'kvflash_worker_active_prefill_tokens{worker="1:0"}'
    speed = 'kvflash_worker_prefill_tokens_per_second{worker="1:0"}'
    flags = ("--router-prefill-tokens-per-second", "auto")
    with Frontend(*flags) as frontend, engines(frontend, FakeEngine("m", typist)):

        def call(start: int) -> Call:
            return Call(
                frontend.url, COMPLETIONS, {**body(), "prompt": [*range(start, start + 5_000)]}
            )

        first = call(0)
        until(lambda: frontend.metric(left) == 5_000, "all of a prompt that nobody can judge")
        assert speed not in frontend.metrics()
        typist.type(1)
        until(lambda: frontend.metric(left) == 0, "its first token")
        assert frontend.metric(speed) > 0

        second = call(5_000)
        running = 'kvflash_worker_active_requests{worker="1:0"}'
        until(lambda: frontend.metric(running) == 2, "the next one")
        until(
            lambda: frontend.metric(left) == 0, "nothing of it to be left, before its first token"
        )
        typist.end.set()
        assert {first.finish().status, second.finish().status} == {200}


def test_a_response_that_has_only_been_created_is_still_in_prefill() -> None:
    """vLLM sends the first two events of a stream of Responses before it waits for a token."""
    output, end = threading.Event(), threading.Event()

    def answer(exchange: Exchange) -> bool:
        exchange.open_stream()
        for name in ("created", "in_progress"):
            exchange.chunk(b'event: response.%b\ndata: {"response": {}}\n\n' % name.encode())
        output.wait(DEADLINE_S)
        exchange.chunk(b'event: response.output_item.added\ndata: {"item": {}}\n\n')
        end.wait(DEADLINE_S)
        exchange.chunk(b"")
        return True

    left = 'kvflash_worker_active_prefill_tokens{worker="1:0"}'
    first, gaps = "kvflash_first_byte_seconds_count", "kvflash_inter_token_seconds_count"
    with Frontend() as frontend, engines(frontend, FakeEngine("m", answer)):
        asked = {"model": "m", "input": "hello " * 100, "stream": True}
        call = Call(frontend.url, "/v1/responses", asked)
        # The client has them at once.
        assert b"response.created" in call.read_event()
        assert b"response.in_progress" in call.read_event()
        assert (frontend.metric(left) > 0, frontend.metric(first)) == (True, 0)
        output.set()
        until(lambda: frontend.metric(left) == 0, "the output to begin")
        assert (frontend.metric(first), frontend.metric(gaps)) == (1, 0)
        end.set()
        assert call.finish().status == 200


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--router-track-output-blocks", "--no-track-active-blocks"),
            "track_output_blocks requires track_active_blocks",
        ),
        (("--metrics-prefix", "a-b"), "--metrics-prefix"),
        (("--router-prefill-tokens-per-second", "0"), "--router-prefill-tokens-per-second"),
        (("--router-prefill-tokens-per-second", "fast"), "got 'fast' (or auto)"),
        (("--router-host-cache-hit-weight", "-1"), "--router-host-cache-hit-weight"),
    ],
)
def test_bad_flags_are_refused(flags: tuple[str, ...], message: str) -> None:
    process = Process("kvflash.frontend", "--port", "0", *flags)
    try:
        assert process.popen.wait(30) == 2
    finally:
        process.close()
    assert message in "".join(process.errors)
