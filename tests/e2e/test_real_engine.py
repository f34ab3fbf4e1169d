"""Two real vLLM engines behind the frontend: opt-in, because an engine is more than a gigabyte.

``KVFLASH_VLLM_ENGINE`` names a program that starts one engine in the foreground:
``PROGRAM HTTP_PORT EVENTS_PORT REPLAY_PORT BLOCKS``, serving tests/vectors/tiny-llama as
``tiny-llama`` with block size 32, prefix caching, KV events and ``--enable-prompt-tokens-details``
(docs/events.md has the command line).
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess

import pytest

from service import VECTORS, Http, until

ENGINE = os.environ.get("KVFLASH_VLLM_ENGINE")
BLOCK_SIZE = 32
BLOCKS = 160
WORDS = [chr(97 + i) + chr(97 + j) + chr(97 + (i * j) % 26) for i in range(26) for j in range(8)]

pytestmark = [
    pytest.mark.real_engine,
    pytest.mark.timeout(900),
    pytest.mark.skipif(ENGINE is None, reason="KVFLASH_VLLM_ENGINE is not set"),
]


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """Two engines: (url, events, replay) each."""
    logs = tmp_path_factory.mktemp("engines")
    started = []
    try:
        for number in range(2):
            ports = free_ports(3)
            log = (logs / f"{number}.log").open("w")
            command = [ENGINE, *map(str, ports), str(BLOCKS)]
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
            started.append((process, log, ports))

        def is_up(port):
            http = Http(f"http://127.0.0.1:{port}")
            try:
                return http.call("GET", "/health")[0] == 200
            except OSError:
                return False
            finally:
                http.close()

        for process, log, ports in started:
            until(lambda port=ports[0]: is_up(port), f"engine in {log.name}", deadline_s=300)
            assert process.poll() is None
        yield [
            (f"http://127.0.0.1:{p[0]}", f"tcp://127.0.0.1:{p[1]}", f"tcp://127.0.0.1:{p[2]}")
            for _, _, p in started
        ]
    finally:
        for process, log, _ in started:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            log.close()


def conversations(seed, count=12, turns=4):
    """Interleaved turns of growing conversations with a system prompt each."""
    rng = random.Random(seed)
    text = lambda n: " ".join(rng.choice(WORDS) for _ in range(n))  # noqa: E731
    systems = [text(70) for _ in range(count)]
    talks = [[{"role": "system", "content": systems[number]}] for number in range(count)]
    for _ in range(turns):
        order = list(range(count))
        rng.shuffle(order)
        for number in order:
            yield talks[number], text(12)


def measure(run, client, engines, mode, *, seed, salt=None):
    """Reuse as the engines count it, and the frontend's four stages, over one cold run."""
    for url, _, _ in engines:
        engine = client(url)
        assert engine.call("POST", "/reset_prefix_cache")[0] == 200
        # The engine publishes the clear with its next step.
        body = {"model": "tiny-llama", "prompt": "reset", "max_tokens": 1}
        engine.post("/v1/completions", body)
    workers = [
        part
        for url, events, replay in engines
        for part in ("--worker", f"{url},events={events},replay={replay}")
    ]
    process = run(
        "kvflash.frontend", "--port", "0", "--host", "127.0.0.1", "--router-mode", mode,
        "--tokenizer", str(VECTORS / "tiny-llama"), "--seed", "1", *workers,
    )  # fmt: skip
    frontend = client(process.ready()["url"])
    until(
        lambda: frontend.call("GET", "/health")[1].get("healthy_workers") == len(engines),
        "both engines healthy",
    )
    prompt = cached = agreed = asked = 0
    for talk, question in conversations(seed):
        talk.append({"role": "user", "content": question})
        body = {"model": "tiny-llama", "messages": talk, "max_tokens": 12, "temperature": 0}
        if salt is not None:
            body["cache_salt"] = salt
        status, answer, headers = frontend.call("POST", "/v1/chat/completions", body)
        assert status == 200, answer
        usage = answer["usage"]
        details = usage["prompt_tokens_details"] or {}
        reused = details.get("cached_tokens") or 0
        prompt += usage["prompt_tokens"]
        cached += reused
        asked += 1
        agreed += int(headers["x-kvflash-overlap-blocks"]) * BLOCK_SIZE == reused
        talk.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
    text = frontend.get("/metrics").decode()
    stages = {
        stage: int(float(text.split(f'kvflash_tokens_total{{stage="{stage}"}} ')[1].split("\n")[0]))
        for stage in ("input", "available", "selected", "delivered")
    }
    events = {
        line.split('"')[1]: int(line.split()[-1])
        for line in text.splitlines()
        if line.startswith("kvflash_events{") and not line.endswith(" 0")
    }
    assert process.terminate() == 0
    return {
        "mode": mode, "requests": asked, "prompt": prompt, "reused": cached, "agreed": agreed,
        **stages, "events": events,
    }  # fmt: skip


def test_kv_mode_reuses_more_and_knows_how_much(engines, run, client):
    round_robin = measure(run, client, engines, "round-robin", seed=7)
    kv = measure(run, client, engines, "kv", seed=7)
    salted = measure(run, client, engines, "kv", seed=7, salt="tenant-a")
    print()
    for result in (round_robin, kv, salted):
        print(json.dumps(result))
    assert kv["requests"] == round_robin["requests"] == 48
    assert kv["reused"] > 1.3 * round_robin["reused"]
    for result in (kv, salted):
        assert result["delivered"] == result["reused"]
        assert result["input"] == result["prompt"], "local tokens are the engine's"
        # An eviction between decision and arrival may cost a request its agreement.
        assert result["agreed"] >= 0.95 * result["requests"]
        assert abs(result["selected"] - result["delivered"]) <= 0.02 * result["prompt"]
