"""The mocker as its users run it: a real process, real HTTP, real ZMQ."""

from __future__ import annotations

import errno
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgpack  # type: ignore[import-untyped,unused-ignore]
import pytest
import zmq

from service import DEADLINE_S, END_OF_REPLAY, Http, Process, until
from support_blocks import HeldBlocks
from support_frontend import COMPLETIONS, Call, Mocker, ask

FAST = ("--speedup-ratio", "1000")


def complete(mocker: Mocker, prompt: object, **options: Any) -> Any:
    return mocker.http[0].post(COMPLETIONS, {"prompt": prompt, **options})


def cached_tokens(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def reset(mocker: Mocker) -> int:
    status, body, _ = mocker.http[0].call("POST", "/reset_prefix_cache")
    assert bool(body) == (status != 200)
    return status


@pytest.fixture(scope="module")
def shared() -> Iterator[Mocker]:
    """One worker for the tests that do not care what others did before."""
    flags = ("--lora-adapters", "sql", "--max-model-len", "500")
    with Mocker(*FAST, *flags) as mocker:
        yield mocker


@pytest.fixture
def http(shared: Mocker) -> Http:
    return shared.http[0]


def test_ready_lines_of_several_workers() -> None:
    with Mocker(*FAST, workers=2) as mocker:
        assert [(one["event"], one["worker"]) for one in mocker.workers] == [
            ("ready", 0),
            ("ready", 1),
        ]
        endpoints = [one[key] for one in mocker.workers for key in ("url", "events", "replay")]
        assert len(set(endpoints)) == 6
        for http in mocker.http:
            assert http.get("/health") == b""
        assert mocker.process.terminate() == 0


def test_models_version_and_tokens(http: Http) -> None:
    cards = http.get("/v1/models")["data"]
    assert [(card["id"], card["parent"], card["max_model_len"]) for card in cards] == [
        ("m", None, 500),
        ("sql", "m", 500),
    ]
    assert "version" in http.get("/version")
    told = {"count": 3, "max_model_len": 500, "tokens": [0x68, 0xC3, 0xA9]}
    assert http.post("/tokenize", {"model": "m", "prompt": "hé"}) == told
    chat = {"messages": [{"role": "user", "content": "x"}], "add_generation_prompt": False}
    tokens = http.post("/tokenize", chat)["tokens"]
    assert http.post("/detokenize", {"tokens": tokens}) == {"prompt": "<|user|>\nx\n"}
    http.post("/detokenize", {"tokens": [256]}, expect=400)


def test_conversation_grows_on_its_own_answers(http: Http) -> None:
    messages = [{"role": "user", "content": "Tell me about the growth of conversations."}]
    before = 0
    for turn in range(3):
        count = http.post("/tokenize", {"messages": messages})["count"]
        answer = http.post("/v1/chat/completions", {"messages": messages, "max_tokens": 40})
        usage = answer["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (count, 40)
        assert usage["total_tokens"] == count + 40
        if turn:
            # Prompt and answer of the turn before, but for the last token of the answer.
            assert cached_tokens(answer) == (before + 39) // 16 * 16
        before = count
        messages.append(answer["choices"][0]["message"])
        messages.append({"role": "user", "content": "Go on."})


def test_stream_equals_the_whole_answer(shared: Mocker) -> None:
    body: dict[str, Any] = {"prompt": "stream this", "max_tokens": 12, "model": "sql"}
    whole = ask(shared.url, COMPLETIONS, body).json
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = ask(shared.url, COMPLETIONS, body).events
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[-2:]] == [None, "length"]
    assert all("usage" not in chunk for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 12
    assert {chunk["model"] for chunk in (*chunks, whole)} == {"sql"}
    del body["stream_options"]
    assert all("usage" not in chunk for chunk in ask(shared.url, COMPLETIONS, body).events)


def test_salts_and_adapters_share_nothing(shared: Mocker) -> None:
    prompt = list(range(200, 250))
    kinds: list[dict[str, Any]] = [{}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"model": "sql"}]
    seen = [cached_tokens(complete(shared, prompt, **kind)) for kind in kinds * 2]
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
def test_errors_have_openai_bodies(http: Http, path: str, body: object, status: int) -> None:
    error = http.post(path, body, expect=status)["error"]
    assert error["code"] == status
    assert error["message"]


@pytest.mark.parametrize("is_streaming", [True, False])
def test_client_that_leaves_frees_its_blocks(is_streaming: bool) -> None:
    with Mocker("--speedup-ratio", "1") as mocker:
        body = {"prompt": "a" * 64, "max_tokens": 10_000, "stream": is_streaming}
        call = Call(mocker.url, COMPLETIONS, body)
        mocker.wait_metric("vllm:num_requests_running", 1)
        assert mocker.metric("vllm:kv_cache_usage_perc") > 0
        assert reset(mocker) == 409
        call.hang_up()
        mocker.wait_metric("vllm:num_requests_running", 0)
        assert mocker.metric("vllm:kv_cache_usage_perc") == 0
        assert mocker.metric("mocker:requests_aborted_total") == 1
        assert reset(mocker) == 200


def test_full_queue_is_429_and_sigterm_drains() -> None:
    flags = ("--speedup-ratio", "5", "--max-num-seqs", "1", "--max-waiting", "1")
    with Mocker(*flags) as mocker:
        body = {"prompt": "a" * 64, "max_tokens": 2_000, "stream": True}
        first = Call(mocker.url, COMPLETIONS, body)
        assert first.read_event().startswith(b"data: ")
        waiting = Call(mocker.url, COMPLETIONS, {"prompt": "b", "max_tokens": 2})
        mocker.wait_metric("vllm:num_requests_waiting", 1)
        refused = ask(mocker.url, COMPLETIONS, {"prompt": "c"})
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        assert refused.json["error"]["code"] == 429
        assert mocker.metric("mocker:requests_rejected_total") == 1
        mocker.process.popen.send_signal(signal.SIGTERM)
        # Both that were accepted get their whole answer.
        assert first.finish().body.endswith(b"data: [DONE]\n\n")
        assert waiting.finish().usage["completion_tokens"] == 2
        assert mocker.process.popen.wait(DEADLINE_S) == 0


def test_signal_before_ready_ends_the_process(run: Callable[..., Process]) -> None:
    process = run("kvflash.mocker", "--port", "0", "--startup-time", "600")
    until(lambda: "starting 1 worker" in "".join(process.errors), "the first log line")
    assert process.terminate() == 0
    assert process.rest() == []


def test_taken_ports_are_named(run: Callable[..., Process]) -> None:
    with Mocker() as mocker:
        port = mocker.url.rpartition(":")[2]
        events = mocker.workers[0]["events"].rpartition(":")[2]
        step = "choose another port, or stop the process on it"
        for flags, taken in (
            (["--port", port], port),
            (["--port", "0", "--zmq-events-port", events], events),
        ):
            why = os.strerror(errno.EADDRINUSE)
            told = f"{flags[-2]}: can't bind {taken} on 127.0.0.1: {why}; {step}\n"
            process = run("kvflash.mocker", *flags)
            assert process.popen.wait(DEADLINE_S) == 2
            assert process.rest() == []
            assert f"kvflash.mocker: error: {told}" in "".join(process.errors)


class EventReader(HeldBlocks):
    """Subscribes to a worker, requests replays, and trusts the answers."""

    def __init__(self, worker: dict[str, Any], era: str) -> None:
        super().__init__()
        self.era = era
        self.context = zmq.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.dealer = self.context.socket(zmq.DEALER)
        for socket, endpoint in ((self.sub, worker["events"]), (self.dealer, worker["replay"])):
            socket.setsockopt(zmq.RCVTIMEO, int(DEADLINE_S * 1000))
            socket.connect(endpoint)
        self.sub.setsockopt(zmq.SUBSCRIBE, b"kv-events")
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
            if sequence == END_OF_REPLAY:
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
            self.remove(event["block_hashes"])
        else:
            assert len(event["token_ids"]) == len(event["block_hashes"]) * event["block_size"]
            salt, *rest = [keys and keys[0] for keys in event.get("extra_keys") or [None]]
            assert not any(rest), "a salt belongs to a first block"
            parent = event["parent_block_hash"]
            assert parent is None or salt is None
            lora = event["lora_name"]
            self.store(event["block_hashes"], event["token_ids"], parent, lora, salt)


@pytest.mark.parametrize("era", ["positional", "tagged"])
def test_events_predict_cached_tokens(era: str) -> None:
    rng = random.Random(11)
    histories: list[list[int]] = [[] for _ in range(6)]
    cache = ("--block-size", "8", "--num-gpu-blocks", "60", "--lora-adapters", "sql")
    with Mocker(*FAST, "--event-era", era, *cache) as mocker:
        reader = EventReader(mocker.workers[0], era)
        predicted, reported = [], []
        for number in range(120):
            if number in (40, 80):
                assert reset(mocker) == 200
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
            answer = complete(mocker, prompt, **options)
            reported.append(cached_tokens(answer))
            histories[which] = prompt + list(answer["choices"][0]["text"].encode())
        reader.catch_up()
        assert predicted == reported
        assert sum(count > 0 for count in reported) > 30, "a prediction of nothing proves little"
        assert reader.kinds == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
        assert mocker.metric("vllm:prefix_cache_hits_total") == sum(reported)
        reader.close()


@pytest.mark.parametrize("era", ["positional", "tagged"])
def test_live_events_are_those_of_the_replay(era: str) -> None:
    flags = ("--event-era", era, "--block-size", "4", "--replay-buffer", "5")
    with Mocker(*FAST, *flags) as mocker:
        reader = EventReader(mocker.workers[0], era)
        # Every request stores a block; one of them is the first after the subscription took hold.
        end = time.monotonic() + DEADLINE_S
        sent = 0
        while not reader.sub.poll(0):
            assert time.monotonic() < end
            complete(mocker, list(sent.to_bytes(4, "big")), max_tokens=1)
            sent += 1
        for _ in range(10):
            complete(mocker, list(sent.to_bytes(4, "big")), max_tokens=1)
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
        for frames in ([b"x"], [b"", b"short"], [b"", END_OF_REPLAY, b"more"]):
            reader.dealer.send_multipart(frames)
        assert reader.replay(sent - 1) == live[-1:]
        # The answer comes after its events: no later request is needed to see the reset.
        assert reset(mocker) == 200
        sequence, payload = reader.live()
        cleared = ["AllBlocksCleared"] if era == "positional" else {"type": "AllBlocksCleared"}
        assert (sequence, msgpack.unpackb(payload)[1]) == (sent, [cleared])
        reader.close()


def test_without_prefix_caching_there_are_no_events() -> None:
    with Mocker(*FAST, "--no-enable-prefix-caching", "--block-size", "4") as mocker:
        for _ in range(2):
            assert cached_tokens(complete(mocker, "abcdefghijkl")) == 0
        assert reset(mocker) == 200
        reader = EventReader(mocker.workers[0], "tagged")
        assert reader.replay(0) == []
        reader.close()
