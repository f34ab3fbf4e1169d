"""The mocker as its users run it: a real process, real HTTP, real ZMQ."""

from __future__ import annotations

import errno
import http.client
import json
import random
import select
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgpack  # type: ignore[import-untyped,unused-ignore]
import pytest
import zmq

DEADLINE_S = 30.0
END = b"\xff" * 8


@dataclass
class Running:
    """A started process and where its workers are."""

    process: subprocess.Popen[bytes]
    workers: list[dict[str, Any]]

    @property
    def url(self) -> str:
        return str(self.workers[0]["url"])

    def get(self, path: str) -> tuple[int, bytes]:
        return fetch(self.url + path, None)

    def post(self, path: str, body: object) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        status, answer = fetch(self.url + path, data)
        return status, json.loads(answer or b"null")

    def complete(self, prompt: object, **options: Any) -> dict[str, Any]:
        status, answer = self.post("/v1/completions", {"prompt": prompt, **options})
        assert status == 200, answer
        assert isinstance(answer, dict)
        return answer

    def metric(self, name: str) -> float:
        status, text = self.get("/metrics")
        assert status == 200
        (line,) = [one for one in text.decode().splitlines() if one.startswith(name + "{")]
        return float(line.rpartition(" ")[2])

    def wait_for_metric(self, name: str, value: float) -> None:
        """Ask until the metric has the value."""
        end = time.monotonic() + DEADLINE_S
        while self.metric(name) != value:
            assert time.monotonic() < end, f"{name} is {self.metric(name)}, not {value}"


def fetch(url: str, data: bytes | None) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(url, data, timeout=DEADLINE_S) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


@contextmanager
def mocker(*flags: str, workers: int = 1) -> Iterator[Running]:
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "kvflash.mocker", "--port", "0"),
            *("--num-workers", str(workers)),
            *("--speedup-ratio", "1000", "--log-level", "warning", *flags),
        ],
        stdout=subprocess.PIPE,
        bufsize=0,
    )
    assert process.stdout is not None
    try:
        ready = []
        for _ in range(workers):
            assert select.select([process.stdout], [], [], DEADLINE_S)[0], "not ready in time"
            ready.append(json.loads(process.stdout.readline()))
        yield Running(process, ready)
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    """One worker for the tests that do not care what others did before."""
    with mocker(
        *("--model-name", "m", "--lora-adapters", "sql", "--block-size", "16"),
        *("--max-model-len", "500", "--zmq-events-port", "0"),
    ) as running:
        yield running


def test_ready_lines_of_several_workers() -> None:
    flags = ("--zmq-events-port", "auto", "--zmq-replay-port", "auto")
    with mocker(*flags, workers=2) as running:
        assert [(one["event"], one["worker"]) for one in running.workers] == [
            ("ready", 0),
            ("ready", 1),
        ]
        endpoints = [one[key] for one in running.workers for key in ("url", "events", "replay")]
        assert len(set(endpoints)) == 6
        for one in running.workers:
            assert fetch(one["url"] + "/health", None) == (200, b"")


def test_models_version_and_tokens(shared: Running) -> None:
    cards = json.loads(shared.get("/v1/models")[1])["data"]
    assert [(card["id"], card["parent"], card["max_model_len"]) for card in cards] == [
        ("m", None, 500),
        ("sql", "m", 500),
    ]
    assert "version" in json.loads(shared.get("/version")[1])
    assert shared.post("/tokenize", {"model": "m", "prompt": "hé"}) == (
        200,
        {"count": 3, "max_model_len": 500, "tokens": [0x68, 0xC3, 0xA9]},
    )
    chat = {"messages": [{"role": "user", "content": "x"}], "add_generation_prompt": False}
    tokens = shared.post("/tokenize", chat)[1]["tokens"]
    assert shared.post("/detokenize", {"tokens": tokens}) == (200, {"prompt": "<|user|>\nx\n"})
    assert shared.post("/detokenize", {"tokens": [256]})[0] == 400


def test_conversation_grows_on_its_own_answers(shared: Running) -> None:
    messages = [{"role": "user", "content": "Tell me about the growth of conversations."}]
    before = 0
    for turn in range(3):
        body = {"messages": messages, "max_tokens": 40}
        count = shared.post("/tokenize", {"messages": messages})[1]["count"]
        status, answer = shared.post("/v1/chat/completions", body)
        assert status == 200
        usage = answer["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (count, 40)
        assert usage["total_tokens"] == count + 40
        if turn:
            # Prompt and answer of the turn before, but for the last token of the answer.
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert cached == (before + 39) // 16 * 16
        before = count
        messages.append(answer["choices"][0]["message"])
        messages.append({"role": "user", "content": "Go on."})


def test_stream_equals_the_whole_answer(shared: Running) -> None:
    body: dict[str, Any] = {"prompt": "stream this", "max_tokens": 12, "model": "sql"}
    whole = shared.post("/v1/completions", body)[1]
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    status, data = fetch(shared.url + "/v1/completions", json.dumps(body).encode())
    assert status == 200
    lines = data.decode().removesuffix("\n\n").split("\n\n")
    assert lines.pop() == "data: [DONE]"
    *chunks, last = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[-2:]] == [None, "length"]
    assert all("usage" not in chunk for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 12
    assert {chunk["model"] for chunk in (*chunks, whole)} == {"sql"}
    del body["stream_options"]
    data = fetch(shared.url + "/v1/completions", json.dumps(body).encode())[1]
    assert b'"usage"' not in data


def test_salts_and_adapters_share_nothing(shared: Running) -> None:
    prompt = list(range(200, 250))
    seen = []
    for kind in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"model": "sql"}) * 2:
        usage = shared.complete(prompt, **kind)["usage"]
        seen.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert seen == [0] * 4 + [48] * 4


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", b"{", 400),
        ("/v1/completions", {"prompt": "a", "model": "other"}, 404),
        ("/v1/completions", {"prompt": "a" * 500}, 400),
        ("/v1/chat/completions", {"messages": []}, 400),
        ("/v1/images/generations", {}, 404),
        ("/health", {}, 405),
    ],
)
def test_errors_have_openai_bodies(shared: Running, path: str, body: object, status: int) -> None:
    got, answer = shared.post(path, body)
    assert got == status
    assert answer["error"]["code"] == status
    assert answer["error"]["message"]


def opened_stream(running: Running, max_tokens: int) -> tuple[Any, http.client.HTTPResponse]:
    """Start a streamed request and wait for its first byte."""
    connection = http.client.HTTPConnection(running.url.removeprefix("http://"), timeout=DEADLINE_S)
    body = {"prompt": "a" * 64, "max_tokens": max_tokens, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body))
    response = connection.getresponse()
    assert response.read(1) == b"d"
    return connection, response


@pytest.mark.parametrize("is_streaming", [True, False])
def test_client_that_leaves_frees_its_blocks(is_streaming: bool) -> None:
    with mocker("--speedup-ratio", "1") as running:
        connection = http.client.HTTPConnection(running.url.removeprefix("http://"))
        body = {"prompt": "a" * 64, "max_tokens": 10_000, "stream": is_streaming}
        connection.request("POST", "/v1/completions", json.dumps(body))
        running.wait_for_metric("vllm:num_requests_running", 1)
        assert running.metric("vllm:kv_cache_usage_perc") > 0
        assert running.post("/reset_prefix_cache", b"")[0] == 409
        connection.close()
        running.wait_for_metric("vllm:num_requests_running", 0)
        assert running.metric("vllm:kv_cache_usage_perc") == 0
        assert running.metric("mocker:requests_aborted_total") == 1
        assert running.post("/reset_prefix_cache", b"") == (200, None)


def test_full_queue_is_429_and_sigterm_drains() -> None:
    flags = ("--speedup-ratio", "5", "--max-num-seqs", "1", "--max-waiting", "1")
    with mocker(*flags) as running:
        first, response = opened_stream(running, 2_000)
        waiting = http.client.HTTPConnection(first.host, first.port, timeout=DEADLINE_S)
        waiting.request("POST", "/v1/completions", json.dumps({"prompt": "b", "max_tokens": 2}))
        running.wait_for_metric("vllm:num_requests_waiting", 1)
        refused = http.client.HTTPConnection(first.host, first.port, timeout=DEADLINE_S)
        refused.request("POST", "/v1/completions", json.dumps({"prompt": "c"}))
        answer = refused.getresponse()
        assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
        assert json.loads(answer.read())["error"]["code"] == 429
        refused.close()
        assert running.metric("mocker:requests_rejected_total") == 1
        running.process.send_signal(signal.SIGTERM)
        # Both that were accepted get their whole answer.
        assert response.read().endswith(b"data: [DONE]\n\n")
        assert json.loads(waiting.getresponse().read())["usage"]["completion_tokens"] == 2
        assert running.process.wait(DEADLINE_S) == 0
        first.close()
        waiting.close()


def test_signal_before_ready_ends_the_process() -> None:
    command = [sys.executable, "-m", "kvflash.mocker", "--port", "0", "--startup-time", "600"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stderr is not None
            assert select.select([process.stderr], [], [], DEADLINE_S)[0], "no log line in time"
            assert b"starting 1 worker\n" in process.stderr.readline()
            process.send_signal(signal.SIGTERM)
            out, _ = process.communicate(timeout=DEADLINE_S)
            assert (process.returncode, out) == (0, b"")
        finally:
            process.kill()


def test_taken_ports_are_named() -> None:
    with mocker("--zmq-events-port", "auto") as running:
        port = running.url.rpartition(":")[2]
        events = running.workers[0]["events"].rpartition(":")[2]
        for flags in (["--port", port], ["--port", "0", "--zmq-events-port", events]):
            result = subprocess.run(
                [sys.executable, "-m", "kvflash.mocker", *flags],
                capture_output=True,
                text=True,
                timeout=DEADLINE_S,
                check=False,
            )
            assert result.returncode == 2
            told = {
                "--port": f"[Errno {errno.EADDRINUSE}] --port {port} on 127.0.0.1",
                "--zmq-events-port": f"--zmq-events-port: can't bind {events} on 127.0.0.1",
            }[flags[-2]]
            assert f"kvflash.mocker: error: {told}" in result.stderr
            assert result.stdout == ""


class EventReader:
    """Subscribes to a worker, requests replays, and trusts the answers."""

    def __init__(self, worker: dict[str, Any], era: str) -> None:
        self.era = era
        self.context = zmq.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.dealer = self.context.socket(zmq.DEALER)
        for socket, endpoint in ((self.sub, worker["events"]), (self.dealer, worker["replay"])):
            socket.setsockopt(zmq.RCVTIMEO, int(DEADLINE_S * 1000))
            socket.connect(endpoint)
        self.sub.setsockopt(zmq.SUBSCRIBE, b"kv-events")
        self.held: dict[int, tuple[object, ...]] = {}
        self.next_sequence = 0
        self.kinds: set[str] = set()

    def close(self) -> None:
        self.context.destroy(linger=0)

    def replay(self, start: int) -> list[tuple[int, bytes]]:
        """All batches from `start` on, as the worker has them now."""
        self.dealer.send_multipart([b"", start.to_bytes(8, "big")])
        batches: list[tuple[int, bytes]] = []
        while True:
            empty, *topic, sequence, payload = self.dealer.recv_multipart()
            assert empty == b""
            assert topic == ([b"kv-events"] if self.era == "tagged" else [])
            if sequence == END:
                assert payload == b""
                return batches
            batches.append((int.from_bytes(sequence, "big"), payload))

    def live(self) -> tuple[int, bytes]:
        topic, sequence, payload = self.sub.recv_multipart()
        assert topic == b"kv-events"
        assert len(sequence) == 8
        return int.from_bytes(sequence, "big"), payload

    def catch_up(self) -> None:
        """Apply every batch there is; once an answer is there, its events are too."""
        for sequence, payload in self.replay(self.next_sequence):
            assert sequence == self.next_sequence
            self.next_sequence += 1
            timestamp_s, events, dp_rank = msgpack.unpackb(payload)
            assert abs(timestamp_s - time.time()) < DEADLINE_S
            assert dp_rank == 0
            for event in events:
                self.apply(event)

    def apply(self, event: Any) -> None:
        if self.era == "positional":
            assert isinstance(event, list)
            names = {
                "BlockStored": "block_hashes parent_block_hash token_ids block_size lora_id "
                "medium lora_name extra_keys",
                "BlockRemoved": "block_hashes medium",
                "AllBlocksCleared": "",
            }[event[0]]
            event = dict(zip(["type", *names.split()], event, strict=True))
        assert isinstance(event, dict)
        self.kinds.add(event["type"])
        if event["type"] == "AllBlocksCleared":
            self.held.clear()
        elif event["type"] == "BlockRemoved":
            assert event["medium"] == "GPU"
            for block in event["block_hashes"]:
                del self.held[block]
        else:
            self.store(event)

    def store(self, event: dict[str, Any]) -> None:
        size = event["block_size"]
        extra_keys = event.get("extra_keys") or [None]
        parent: tuple[object, ...] = (event["lora_name"], (extra_keys[0] or [None])[0])
        if event["parent_block_hash"] is not None:
            assert not any(extra_keys), "a salt belongs to a first block"
            parent = self.held[event["parent_block_hash"]]
        for index, block in enumerate(event["block_hashes"]):
            parent = (parent, tuple(event["token_ids"][index * size : (index + 1) * size]))
            self.held[block] = parent

    def cached_tokens(self, tokens: list[int], size: int, lora: str | None, salt: object) -> int:
        known = set(self.held.values())
        parent: tuple[object, ...] = (lora, salt)
        for start in range(0, (len(tokens) - 1) // size * size, size):
            parent = (parent, tuple(tokens[start : start + size]))
            if parent not in known:
                return start
        return (len(tokens) - 1) // size * size


@pytest.mark.parametrize("era", ["positional", "tagged"])
def test_events_predict_cached_tokens(era: str) -> None:
    rng = random.Random(11)
    histories: list[list[int]] = [[] for _ in range(6)]
    flags = ("--zmq-events-port", "auto", "--zmq-replay-port", "auto", "--event-era", era)
    cache = ("--block-size", "8", "--num-gpu-blocks", "60", "--lora-adapters", "sql")
    with mocker(*flags, *cache) as running:
        reader = EventReader(running.workers[0], era)
        predicted, reported = [], []
        for number in range(120):
            if number in (40, 80):
                assert running.post("/reset_prefix_cache", b"")[0] == 200
            # A conversation keeps its adapter and salt.
            which = rng.randrange(len(histories))
            lora, salt = (None, None, None, "sql")[which % 4], (None, "s", "t")[which % 3]
            if len(histories[which]) > 250:
                histories[which] = []
            histories[which] += [rng.randrange(256) for _ in range(rng.randrange(1, 60))]
            prompt = histories[which]
            reader.catch_up()
            predicted.append(reader.cached_tokens(prompt, 8, lora, salt))
            options = {"model": lora, "cache_salt": salt, "max_tokens": rng.randrange(1, 30)}
            answer = running.complete(prompt, **options)
            reported.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
            histories[which] = prompt + list(answer["choices"][0]["text"].encode())
        reader.catch_up()
        assert predicted == reported
        assert sum(count > 0 for count in reported) > 30, "a prediction of nothing proves little"
        assert reader.kinds == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
        assert running.metric("vllm:prefix_cache_hits_total") == sum(reported)
        reader.close()


@pytest.mark.parametrize("era", ["positional", "tagged"])
def test_live_events_are_those_of_the_replay(era: str) -> None:
    flags = ("--zmq-events-port", "auto", "--zmq-replay-port", "auto", "--event-era", era)
    with mocker(*flags, "--block-size", "4", "--replay-buffer", "5") as running:
        reader = EventReader(running.workers[0], era)
        # Every request stores a block; one of them is the first after the subscription took hold.
        end = time.monotonic() + DEADLINE_S
        sent = 0
        while not reader.sub.poll(0):
            assert time.monotonic() < end
            running.complete(list(sent.to_bytes(4, "big")), max_tokens=1)
            sent += 1
        for _ in range(10):
            running.complete(list(sent.to_bytes(4, "big")), max_tokens=1)
            sent += 1
        live = [reader.live()]
        while live[-1][0] < sent - 1:
            live.append(reader.live())
        assert [sequence for sequence, _ in live] == list(range(live[0][0], sent))
        assert reader.replay(0) == live[-5:], "the buffer keeps the last five"
        assert reader.replay(sent - 2) == live[-2:]
        assert reader.replay(sent) == []
        assert reader.replay(2**64 - 1) == []
        # Malformed requests are dropped without an effect on others.
        for frames in ([b"x"], [b"", b"short"], [b"", END, b"more"]):
            reader.dealer.send_multipart(frames)
        assert reader.replay(sent - 1) == live[-1:]
        # The answer comes after its events: no later request is needed to see the reset.
        assert running.post("/reset_prefix_cache", b"")[0] == 200
        sequence, payload = reader.live()
        cleared = ["AllBlocksCleared"] if era == "positional" else {"type": "AllBlocksCleared"}
        assert (sequence, msgpack.unpackb(payload)[1]) == (sent, [cleared])
        reader.close()


def test_without_prefix_caching_there_are_no_events() -> None:
    flags = ("--zmq-events-port", "auto", "--zmq-replay-port", "auto")
    with mocker(*flags, "--no-enable-prefix-caching", "--block-size", "4") as running:
        for _ in range(2):
            details = running.complete("abcdefghijkl")["usage"]["prompt_tokens_details"]
            assert details == {"cached_tokens": 0}
        assert running.post("/reset_prefix_cache", b"")[0] == 200
        reader = EventReader(running.workers[0], "tagged")
        assert reader.replay(0) == []
        reader.close()
