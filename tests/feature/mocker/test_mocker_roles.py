"""The mocker as a worker of the runtime, and in the roles of disaggregated serving."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest

from kvflash import DistributedRuntime, InvalidArgumentError, TransportError
from kvflash.discovery import open_discovery
from kvflash.mocker import tokenizer
from kvflash.mocker.config import MockerConfig
from kvflash.mocker.handover import Handover, Room, meet
from kvflash.mocker.worker import RuntimeWorker
from ports import free_port
from service import EmbeddedIndexer, until, wait_for_sequence

FAST = ("--speedup-ratio", "1000", "--block-size", "4", "--num-gpu-blocks", "512")
ENDPOINT = "tests.backend.generate"


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "discovery"


@pytest.fixture
def start(run, folder):
    """Start a mocker that finds the test's discovery; its ready lines."""

    def started(*flags, workers=1):
        process = run("kvflash.mocker", *FAST, *flags, env={"KVFLASH_DISCOVERY_DIR": str(folder)})
        return process, [process.ready() for _ in range(workers)]

    return started


def with_runtime(folder, check):
    """Run a coroutine function of a runtime in the test's discovery."""

    async def work():
        discovery = open_discovery("file", folder=folder)
        async with DistributedRuntime(discovery) as runtime:
            result = await asyncio.wait_for(check(runtime), 60)
        await discovery.close()
        return result

    return asyncio.run(work())


async def ask(client, token_ids, instance=None, **fields):
    request = {"token_ids": token_ids, "stop_conditions": {"max_tokens": 8}, **fields}
    stream = client.random(request) if instance is None else client.direct(request, instance)
    return [item async for item in await stream]


def tokens_of(items):
    return [token for item in items for token in item["token_ids"]]


async def found(runtime, prefix):
    values = await runtime.discovery.get_prefix(prefix)
    return {key: json.loads(value) for key, value in values.items()}


def test_it_announces_all_that_a_router_needs(start, folder):
    _, ready = start("--endpoint", ENDPOINT, "--num-workers", "2", "--lora-adapters", "sql",
                     "--max-num-seqs", "7", workers=2)  # fmt: skip
    ids = {line["instance_id"] for line in ready}
    assert len(ids) == 2

    async def check(runtime):
        cards = await found(runtime, "v1/models/tests/backend/generate/")
        assert {int(key.rpartition("/")[2]) for key in cards} == ids
        for card in cards.values():
            assert card["model_name"] == "mock-model"
            assert card["model_input"] == "tokens"
            assert card["model_type"] == ["chat", "completions"]
            assert card["kv_cache_block_size"] == 4
            assert card["total_kv_blocks"] == 512
            assert card["max_num_seqs"] == 7
            assert card["lora_names"] == ["sql"]
            assert card["bootstrap"] is None
        events = await found(runtime, "v1/events/tests/backend/")
        for line in ready:
            where = events[f"v1/events/tests/backend/{line['instance_id']}/0"]
            assert where["endpoint"] == line["events"][0]
            assert where["replay_endpoint"] == line["replay"][0]
            assert where["block_size"] == 4
        instances = await found(runtime, "v1/instances/tests/backend/")
        assert {key.split("/")[4] for key in instances} == {"generate", "load_metrics"}

    with_runtime(folder, check)


def test_tokens_come_back_and_their_blocks_are_told(start, folder):
    process, (ready,) = start("--endpoint", ENDPOINT, "--data-parallel-size", "2")
    assert len(ready["events"]) == 2
    prompt = list(range(20))
    indexer = EmbeddedIndexer()
    try:
        for rank in (0, 1):
            indexer.http.post("/register", {
                "instance_id": 1, "model_name": "m", "block_size": 4, "dp_rank": rank,
                "endpoint": ready["events"][rank], "replay_endpoint": ready["replay"][rank],
            }, expect=201)  # fmt: skip

        async def check(runtime):
            client = await runtime.endpoint(ENDPOINT).client()
            assert client.instance_ids() == [ready["instance_id"]]
            items = await ask(client, prompt, dp_rank=1)
            assert len(tokens_of(items)) == 8
            assert [item["finish_reason"] for item in items[:-1]] == [None] * (len(items) - 1)
            assert items[-1]["finish_reason"] == "length"
            assert "disaggregated_params" not in items[-1]
            usage = items[-1]["completion_usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (20, 8)
            again = await ask(client, prompt, dp_rank=1)
            assert tokens_of(again) == tokens_of(items)
            cached = again[-1]["completion_usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached == 16
            other = await ask(client, prompt, dp_rank=0)
            assert other[-1]["completion_usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            with pytest.raises(InvalidArgumentError, match=r"dp_rank must be in 0\.\.=1, got 2"):
                await ask(client, prompt, dp_rank=2)
            with pytest.raises(InvalidArgumentError, match="token_ids must have at least one"):
                await ask(client, [])
            with pytest.raises(InvalidArgumentError, match="lora_name 'no' is not one of"):
                await ask(client, prompt, lora_name="no")

        with_runtime(folder, check)
        wait_for_sequence(indexer.http, 1, 1, 1)

        def scores():
            body = {"token_ids": prompt, "model_name": "m"}
            return indexer.http.post("/query", body)["scores"].get("1")

        until(lambda: scores() == {"0": 20, "1": 20}, "the blocks of both ranks")
    finally:
        indexer.close()
    assert process.terminate() == 0


def test_its_load_is_told_and_a_dropped_stream_ends_its_request(start, folder):
    start("--endpoint", ENDPOINT, "--speedup-ratio", "0.05")

    async def check(runtime):
        component = runtime.namespace("tests").component("backend")
        loads = await (await component.endpoint("load_metrics").client()).random({})
        first = await anext(loads)
        assert first == {
            "dp_rank": 0, "active_decode_blocks": 0, "active_prefill_tokens": 0,
            "kv_used_blocks": 0, "kv_total_blocks": 512, "max_num_batched_tokens": 8192,
        }  # fmt: skip
        client = await runtime.endpoint(ENDPOINT).client()
        request = {"token_ids": list(range(40)), "stop_conditions": {"max_tokens": 500}}
        stream = await client.random(request)
        await anext(stream)
        busy = await anext(loads)
        assert busy["active_decode_blocks"] >= 10
        await stream.aclose()
        async for load in loads:
            if load["active_decode_blocks"] == 0:
                break
        await loads.aclose()

    with_runtime(folder, check)


def test_it_leaves_when_it_is_told_and_when_it_dies(start, folder):
    killed, _ = start("--endpoint", ENDPOINT)
    told, _ = start("--endpoint", ENDPOINT)

    async def check(runtime):
        prefix = "v1/instances/tests/backend/generate/"
        assert len(await found(runtime, prefix)) == 2
        for left, end in ((1, killed.kill), (0, told.terminate)):
            await asyncio.to_thread(end)
            async with runtime.discovery.watch(prefix) as watch:
                async for _ in watch:
                    if len(await found(runtime, prefix)) == left:
                        break
        assert await found(runtime, "v1/") == {}

    with_runtime(folder, check)
    assert told.popen.returncode == 0


def test_an_endpoint_that_is_none_is_refused(run):
    process = run("kvflash.mocker", "--endpoint", "only.two")
    assert process.popen.wait(30) == 2
    until(lambda: "--endpoint: endpoint must be" in "".join(process.errors), "the reason")


def test_prefill_hands_over_to_decode_through_the_runtime(start, folder):
    start("--endpoint", "tests.prefill.generate", "--is-prefill-worker")
    start("--endpoint", ENDPOINT, "--is-decode-worker")
    prompt = list(range(100, 120))

    async def check(runtime):
        (card,) = (await found(runtime, "v1/models/tests/prefill/")).values()
        assert card["model_type"] == ["prefill"]
        first = await (await runtime.endpoint("tests.prefill.generate").client())
        second = await (await runtime.endpoint(ENDPOINT).client())
        items = await ask(first, prompt)
        assert len(tokens_of(items)) == 1
        params = items[-1]["disaggregated_params"]["kv_transfer_params"]
        assert params["do_remote_prefill"] is True
        assert len(params["remote_block_ids"]) == 5
        result = {"disaggregated_params": {"kv_transfer_params": params}}
        answer = await ask(second, prompt, prefill_result=result)
        assert len(tokens_of(answer)) == 8
        assert tokens_of(answer)[0] == tokens_of(items)[0]
        # Without a prefill it computes the prompt itself.
        assert tokens_of(await ask(second, prompt)) == tokens_of(answer)
        with pytest.raises(InvalidArgumentError, match="need remote_engine_id"):
            broken = {"kv_transfer_params": {"do_remote_prefill": True}}
            await ask(second, prompt, prefill_result={"disaggregated_params": broken})

    with_runtime(folder, check)


def test_decode_waits_in_a_room_until_prefill_is_done_or_failed(start, folder):
    port = free_port()
    start(
        "--endpoint",
        "tests.prefill.generate",
        "--is-prefill-worker",
        "--bootstrap-ports",
        str(port),
    )
    start("--endpoint", ENDPOINT, "--is-decode-worker")
    prompt = list(range(20))

    async def check(runtime):
        (card,) = (await found(runtime, "v1/models/tests/prefill/")).values()
        assert card["bootstrap"] == {"host": "127.0.0.1", "port": port}
        first = await (await runtime.endpoint("tests.prefill.generate").client())
        second = await (await runtime.endpoint(ENDPOINT).client())

        def room(number):
            info = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": number}
            return {"bootstrap_info": info}

        waiting = asyncio.create_task(ask(second, prompt, **room(7)))
        # Others pass it meanwhile.
        assert tokens_of(await ask(second, prompt))
        assert not waiting.done()
        await ask(first, prompt, **room(7))
        assert len(tokens_of(await waiting)) == 8
        # In the other order, too.
        await ask(first, prompt, **room(8))
        assert len(tokens_of(await ask(second, prompt, **room(8)))) == 8
        # A failed prefill fails its decode, whichever comes first.
        waiting = asyncio.create_task(ask(second, prompt, **room(9)))
        with pytest.raises(InvalidArgumentError, match="lora_name"):
            await ask(first, prompt, lora_name="no", **room(9))
        with pytest.raises(TransportError, match=r"room 9 .*the prefill failed"):
            await waiting
        nobody = {**room(1)["bootstrap_info"], "bootstrap_port": free_port()}
        with pytest.raises(TransportError, match="no prefill from room 1"):
            await ask(second, prompt, bootstrap_info=nobody)

    with_runtime(folder, check)


def test_the_openai_api_hands_over_as_vllm_does(run, client):
    prefill = client(run("kvflash.mocker", *FAST, "--port", "0", "--is-prefill-worker")
                     .ready()["url"])  # fmt: skip
    decode = client(run("kvflash.mocker", *FAST, "--port", "0", "--is-decode-worker")
                    .ready()["url"])  # fmt: skip
    asked = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}
    body = {"prompt": list(range(20)), "max_tokens": 6}
    first = prefill.post("/v1/completions", {**body, "kv_transfer_params": asked})
    assert first["usage"]["completion_tokens"] == 1
    params = first["kv_transfer_params"]
    assert params["do_remote_prefill"] is True
    second = decode.post("/v1/completions", {**body, "kv_transfer_params": params})
    assert second["usage"]["completion_tokens"] == 6
    assert "kv_transfer_params" not in second
    assert (
        second["choices"][0]["text"] == decode.post("/v1/completions", body)["choices"][0]["text"]
    )
    status, answer, _ = decode.call("POST", "/v1/completions", {**body, "kv_transfer_params": 1})
    assert (status, answer["error"]["param"]) == (400, "kv_transfer_params")


def test_responses_and_messages_are_handed_over_too(run, client):
    flags = (*FAST, "--port", "0")
    prefill = client(run("kvflash.mocker", *flags, "--is-prefill-worker").ready()["url"])
    decode = client(run("kvflash.mocker", *flags, "--is-decode-worker").ready()["url"])
    asked = {"kv_transfer_params": {"do_remote_decode": True}}
    for path, body in (
        ("/v1/responses", {"input": "a few words to prefill", "max_output_tokens": 3}),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": "a few words"}], "max_tokens": 3},
        ),
    ):
        params = prefill.post(path, {**body, **asked})["kv_transfer_params"]
        assert params["do_remote_prefill"] is True
        second = decode.post(path, {**body, "kv_transfer_params": params})
        assert second["usage"]["output_tokens"] == 3
        assert "kv_transfer_params" not in second


def test_the_openai_api_hands_over_as_sglang_does(run, client):
    port = free_port()
    prefill = client(run("kvflash.mocker", *FAST, "--port", "0", "--is-prefill-worker",
                         "--bootstrap-ports", str(port)).ready()["url"])  # fmt: skip
    decode = client(run("kvflash.mocker", *FAST, "--port", "0", "--is-decode-worker")
                    .ready()["url"])  # fmt: skip
    body = {
        "prompt": list(range(20)), "max_tokens": 6,
        "bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": 5,
    }  # fmt: skip
    answers = []
    thread = threading.Thread(target=lambda: answers.append(decode.post("/v1/completions", body)))
    thread.start()
    assert prefill.post("/v1/completions", body)["usage"]["completion_tokens"] == 1
    thread.join(60)
    assert answers[0]["usage"]["completion_tokens"] == 6
    # A prefill that is refused leaves its decode nothing to wait for.
    failed = {**body, "bootstrap_room": 6}
    assert prefill.call("POST", "/v1/completions", {**failed, "model": "no"})[0] == 404
    status, answer, _ = decode.call("POST", "/v1/completions", failed)
    assert status == 500
    assert f"room 6 at 127.0.0.1:{port}: the prefill failed" in answer["error"]["message"]
    status, answer, _ = decode.call("POST", "/v1/completions", {**body, "bootstrap_port": 0})
    assert (status, answer["error"]["param"]) == (400, "bootstrap_port")
    # So do the other APIs.
    messages = [{"role": "user", "content": "hi"}]
    for number, (path, fields) in enumerate({
        "/v1/chat/completions": {"messages": messages}, "/v1/responses": {"input": "hi"},
        "/v1/messages": {"messages": messages, "max_tokens": 3}, "/generate": {"text": "hi"},
        "/inference/v1/generate": {"token_ids": [1, 2]},
    }.items(), 7):  # fmt: skip
        room = {name: body[name] for name in ("bootstrap_host", "bootstrap_port")}
        asked = {**fields, **room, "bootstrap_room": number}
        assert prefill.call("POST", path, {**asked, "model": "no"})[0] == 404, path
        assert decode.call("POST", path, asked)[0] == 500, path
        assert prefill.call("POST", path, asked)[0] == 200, path
        assert decode.call("POST", path, asked)[0] == 200, path


def test_computed_prompts_are_fetched_before_a_prefill_worker_ends():
    async def check():
        port = free_port()
        handover = Handover("prefill", "127.0.0.1", 16)
        await handover.open(port)
        rooms = [Room(host="127.0.0.1", port=port, number=number) for number in range(3)]
        early = asyncio.create_task(meet(rooms[0]))
        never = asyncio.create_task(meet(rooms[2]))
        for room in rooms[:2]:
            handover.finish(room, is_done=True)
        closing = asyncio.create_task(handover.close(30.0))
        await early
        assert not closing.done()
        # Its decode worker comes only now.
        await meet(rooms[1])
        await closing
        with pytest.raises(TransportError, match="no prefill from room 2"):
            await never

    asyncio.run(check())


def test_a_computed_prompt_that_nobody_fetches_holds_nothing_up():
    async def check():
        port = free_port()
        handover = Handover("prefill", "127.0.0.1", 16)
        await handover.open(port)
        room = Room(host="127.0.0.1", port=port, number=1)
        handover.finish(room, is_done=True)
        await asyncio.wait_for(handover.close(0.01), 30)
        with pytest.raises(TransportError, match="no prefill from room 1"):
            await meet(room)

    asyncio.run(check())


@pytest.mark.parametrize("line", [b"no JSON", b"[]", b"{}", b'{"room": 1e999}', b"[" * 1_000])
def test_a_decode_worker_that_names_no_room_is_refused(caplog, line):
    async def check():
        port = free_port()
        handover = Handover("prefill", "127.0.0.1", 16)
        await handover.open(port)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(line + b"\n")
        assert await reader.read() == b""
        writer.close()
        await handover.close(0.01)

    asyncio.run(check())
    assert [record.name for record in caplog.records] == ["kvflash.mocker.handover"]
    assert "a decode worker was refused" in caplog.text


def test_a_room_that_is_never_done_is_forgotten(monkeypatch):
    async def check():
        port = free_port()
        handover = Handover("prefill", "127.0.0.1", 16)
        await handover.open(port)
        monkeypatch.setattr("kvflash.mocker.handover.MEET_TIMEOUT_S", 0.05)
        with pytest.raises(TransportError, match="no prefill from room 1"):
            await meet(Room(host="127.0.0.1", port=port, number=1))
        await asyncio.wait_for(handover.close(30.0), 30)
        assert not handover._rooms

    asyncio.run(check())


def test_an_answer_of_something_else_is_no_prefill():
    async def check():
        async def answer(_, writer):
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(TransportError, match=r"no prefill from room 1 .* got b'HTTP"):
            await meet(Room(host="127.0.0.1", port=port, number=1))
        server.close()

    asyncio.run(check())


def test_a_worker_waits_while_discovery_is_down(monkeypatch, caplog):
    monkeypatch.setenv("KVFLASH_DISCOVERY", "mem")
    monkeypatch.setattr("kvflash.mocker.worker.RETRY_S", 0)
    announce, refused = DistributedRuntime.announce, []

    async def fail_first(runtime, key, value):
        if key not in refused:
            refused.append(key)
            raise TransportError("etcd can't be reached")
        await announce(runtime, key, value)

    monkeypatch.setattr(DistributedRuntime, "announce", fail_first)

    async def work():
        config = MockerConfig(endpoint=ENDPOINT, zmq_events_port="auto")
        worker = RuntimeWorker(0, config, tokenizer.load(None))
        await worker.start()
        await worker.close()

    asyncio.run(asyncio.wait_for(work(), 60))
    kinds = [key.split("/")[1] for key in refused]
    assert kinds == ["events", "instances", "models", "instances"]
    assert caplog.text.count("can't be announced: etcd can't be reached; trying again") == 4
