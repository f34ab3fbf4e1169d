"""The launchers with an engine's double; a real vLLM is in test_real_launcher.py."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from kvflash import DistributedRuntime, KvPushRouter, KvRouterConfig, NotFoundError
from kvflash.discovery import open_discovery
from kvflash.launcher.probe import requests_in
from ports import free_port
from servers import NatsServer
from service import SUPPORT, EmbeddedIndexer, Http, until
from support_frontend import COMPLETIONS, FrontendProcess, ask

FAKE = f"{sys.executable} {SUPPORT / 'fake_engine.py'}"


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "discovery"


@pytest.fixture
def launch(run, folder):
    def started(engine, *flags, **env):
        return run(
            f"kvflash.{engine}", "--engine-command", FAKE, *flags,
            env={"KVFLASH_DISCOVERY_DIR": str(folder), "KVFLASH_HOST": "127.0.0.1", **env},
        )  # fmt: skip

    return started


@pytest.fixture
def nats(tmp_path):
    (tmp_path / "nats").mkdir()
    server = NatsServer(tmp_path / "nats")
    yield server
    server.close()


def ready(process, engine):
    """The launcher's ready line; the double has one of its own."""
    line = process.ready()
    while line.get("engine") != engine:
        line = process.ready()
    return line


def found(folder):
    async def look():
        discovery = open_discovery("file", folder=folder)
        values = await discovery.get_prefix("v1/")
        await discovery.close()
        return {key: json.loads(value) for key, value in values.items()}

    return asyncio.run(look())


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def child_of(process):
    tasks = Path(f"/proc/{process.popen.pid}/task/{process.popen.pid}/children")
    (pid,) = tasks.read_text().split()
    return int(pid)


def test_a_launched_engine_is_found_with_all_that_a_router_needs(launch, folder):
    process = launch("vllm", "--model", "some/model", "--served-model-name", "served")
    line = ready(process, "vllm")
    keys = found(folder)
    number = line["instance_id"]
    assert set(keys) == {
        f"v1/instances/dynamo/backend/generate/{number}",
        f"v1/models/dynamo/backend/generate/{number}",
        f"v1/events/dynamo/backend/{number}/0",
    }
    instance = keys[f"v1/instances/dynamo/backend/generate/{number}"]
    assert instance["transport"] == {"kind": "openai", "url": line["url"]}
    card = keys[f"v1/models/dynamo/backend/generate/{number}"]
    assert (card["model_name"], card["model_input"]) == ("served", "text")
    assert card["model_type"] == ["chat", "completions"]
    # Neither was said: the engine tells them.
    assert (card["kv_cache_block_size"], card["total_kv_blocks"]) == (16, 300)
    assert card["lora_names"] == ["sql"]
    assert card["user_data"] == {"engine": "vllm", "role": "agg"}
    events = keys[f"v1/events/dynamo/backend/{number}/0"]
    assert events["block_size"] == 16
    # The engine answers, and its events are where they are said to be.
    engine, indexer = Http(line["url"]), EmbeddedIndexer()
    try:
        indexer.http.post("/register", {
            "instance_id": 1, "model_name": "m", "block_size": 16,
            "endpoint": events["endpoint"], "replay_endpoint": events["replay_endpoint"],
        }, expect=201)  # fmt: skip
        prompt = list(range(64))
        engine.post("/v1/completions", {"prompt": prompt, "max_tokens": 2})
        body = {"token_ids": prompt, "model_name": "m"}
        until(
            lambda: indexer.http.post("/query", body)["scores"].get("1") == {"0": 64}, "the blocks"
        )
    finally:
        engine.close()
        indexer.close()
    pid = child_of(process)
    assert process.terminate() == 0
    assert gone(pid)
    assert found(folder) == {}


def test_a_prefill_engine_of_sglang_has_a_room_and_a_place_of_its_own(launch, folder):
    process = launch("sglang", "--model-path", "m", "--is-prefill-worker", "--page-size", "8",
                     "--block-size", "8", "--endpoint", "ns.pre.gen")  # fmt: skip
    number = ready(process, "sglang")["instance_id"]
    card = found(folder)[f"v1/models/ns/pre/gen/{number}"]
    assert card["model_type"] == ["prefill"]
    assert card["bootstrap"] == {"host": "127.0.0.1", "port": 8998}
    assert card["kv_cache_block_size"] == 8


def test_an_engine_that_dies_is_unregistered_and_its_status_kept(launch, folder):
    process = launch("vllm", "m")
    ready(process, "vllm")
    os.kill(child_of(process), signal.SIGKILL)
    assert process.popen.wait(30) == 128 + signal.SIGKILL
    assert found(folder) == {}


@pytest.mark.parametrize(("status", "wanted"), [(7, 7), (0, 1)])
def test_an_engine_that_does_not_start_gives_its_status(status, wanted, launch):
    process = launch("vllm", "m", "--fail-with", str(status))
    assert process.popen.wait(30) == wanted
    line = f"ended with status {status} before it was ready"
    until(lambda: line in "".join(process.errors), "the log")


def test_another_server_at_its_port_is_not_taken_for_the_engine(launch, folder):
    other = launch("vllm", "m")
    line = ready(other, "vllm")
    port = str(urlsplit(line["url"]).port)
    process = launch("vllm", "m", "--port", port)
    assert process.popen.wait(30) == 2
    told = f"--port {port}: another server answers at 127.0.0.1:{port}; choose another port"
    until(lambda: told in "".join(process.errors), "the log")
    assert "starting" not in "".join(process.errors)
    instances = [key for key in found(folder) if "/instances/" in key]
    assert instances == [f"v1/instances/dynamo/backend/generate/{line['instance_id']}"]


@pytest.mark.parametrize("is_back", [True, False])
def test_an_engine_is_kept_while_discovery_fails_and_registered_when_it_is_back(
    is_back, launch, folder
):
    process = launch("vllm", "m")
    until((folder / "new").is_dir, "the launcher to have begun")
    (folder / "new").rmdir()
    (folder / "new").write_text("in the way")
    said = "the engine can't be registered: discovery folder"
    until(lambda: said in "".join(process.errors), "the failure to be said")
    pid = child_of(process)
    if is_back:
        (folder / "new").unlink()
        number = ready(process, "vllm")["instance_id"]
        assert f"v1/instances/dynamo/backend/generate/{number}" in found(folder)
        assert child_of(process) == pid
        back = "discovery takes the engine after at least"
        until(lambda: back in "".join(process.errors), "the end of the failure to be said")
        assert "".join(process.errors).count(said) == 1
    assert process.terminate() == 0
    assert gone(pid)


def streaming(url, tokens):
    """A stream of an engine that has begun."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    body = {"prompt": "a", "max_tokens": tokens, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body))
    response = connection.getresponse()
    assert response.status == 200 and response.readline().startswith(b"data: ")
    return connection, response


def test_requests_of_an_engine_end_before_it_is_told_to(launch, folder):
    # As vLLM it cuts its requests off at the signal.
    process = launch("vllm", "m", "--speed", "5", "--engine-drain", "0")
    line = ready(process, "vllm")
    connection, response = streaming(line["url"], 1_000)
    process.popen.send_signal(signal.SIGTERM)
    until(lambda: found(folder) == {}, "nothing to be announced")
    # Of a router that has not heard of it yet.
    late, second = streaming(line["url"], 5)
    assert second.read().endswith(b"data: [DONE]\n\n")
    assert response.read().endswith(b"data: [DONE]\n\n")
    assert process.popen.wait(30) == 0
    connection.close()
    late.close()


def test_requests_that_last_longer_than_the_drain_are_cut_off(launch):
    process = launch("vllm", "m", "--speed", "0.01", "--engine-drain", "0",
                     "--drain-timeout", "0.2")  # fmt: skip
    connection, response = streaming(ready(process, "vllm")["url"], 1_000)
    assert process.terminate() == 0
    with contextlib.suppress(http.client.IncompleteRead, ConnectionError):
        assert not response.read().endswith(b"data: [DONE]\n\n")
    until(lambda: "still had requests after 0.2 s" in "".join(process.errors), "the log")
    connection.close()


def test_the_requests_of_an_engine_are_counted_in_its_words():
    vllm = (
        "# HELP vllm:num_requests_running Number of requests\n"
        'vllm:num_requests_running{engine="0",model_name="m"} 2.0\n'
        'vllm:num_requests_running{engine="1",model_name="m"} 1.0\n'
        'vllm:num_requests_waiting{engine="0",model_name="m"} 4.0\n'
        'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 4.0\n'
    )
    sglang = 'sglang:num_running_reqs{tp_rank="0"} 3.0\nsglang:num_queue_reqs{tp_rank="0"} 0.0\n'
    assert [requests_in(text) for text in (vllm, sglang, "", "other 1")] == [7, 3, None, None]


def test_a_program_that_is_not_there_is_named(run, folder):
    process = run("kvflash.vllm", "m", "--engine-command", "/no/such/vllm",
                  env={"KVFLASH_DISCOVERY_DIR": str(folder)})  # fmt: skip
    assert process.popen.wait(30) == 2
    process.close()
    [said] = [line for line in process.errors if "vllm: error: " in line]
    assert "can't start /no/such/vllm: No such file or directory: install the engine" in said
    assert "--engine-command" in said


def test_an_engine_does_not_outlive_a_launcher_that_is_killed(launch, folder):
    process = launch("vllm", "m")
    ready(process, "vllm")
    pid = child_of(process)
    process.kill()
    until(lambda: gone(pid), "the engine to end")
    until(lambda: found(folder) == {}, "nothing to be announced")


LOADING = ("kvflash.vllm", "m", "--engine-command", "sh -c 'exec sleep 1000'")


def engine_of(launcher):
    """The number of the engine's process, once it loads."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
    pid = int(until(lambda: children.read_text().split(), "the engine's process")[0])
    until(lambda: Path(f"/proc/{pid}/comm").read_text() == "sleep\n", "the engine to load")
    return pid


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_it_loads_ends_it(run, folder, number):
    process = run(*LOADING, env={"KVFLASH_DISCOVERY_DIR": str(folder)})
    pid = engine_of(process.popen)
    process.popen.send_signal(number)
    assert process.popen.wait(30) == 128 + number
    assert gone(pid)


def test_under_nohup_a_terminal_may_close(folder):
    words = ["nohup", sys.executable, "-m", *LOADING]
    env = {**os.environ, "KVFLASH_DISCOVERY_DIR": str(folder)}
    with subprocess.Popen(
        words, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as launcher:
        try:
            engine_of(launcher)
            status = Path(f"/proc/{launcher.pid}/status").read_text()
            (ignored,) = re.findall(r"^SigIgn:\s*(\w+)$", status, re.M)
            assert int(ignored, 16) & 1 << (signal.SIGHUP - 1)
        finally:
            launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(30) == 128 + signal.SIGTERM


def test_routers_and_clients_of_the_runtime_ask_a_launched_engine(launch, folder):
    engines = [launch("vllm", "some/model", "--served-model-name", "served") for _ in range(2)]
    numbers = {ready(engine, "vllm")["instance_id"] for engine in engines}
    prompt = list(range(64))

    async def ask():
        discovery = open_discovery("file", folder=folder)
        async with DistributedRuntime(discovery) as runtime:
            endpoint = runtime.endpoint("dynamo.backend.generate")
            async with KvPushRouter(endpoint, 16, KvRouterConfig()) as router:
                stream = await router.generate(
                    prompt, model="served", stop_conditions={"max_tokens": 5}
                )
                home = stream.worker_id
                assert home in numbers
                items = [item async for item in stream]
                assert sum(len(item["token_ids"]) for item in items) == 5
                assert items[-1]["finish_reason"] == "length"
                assert items[-1]["completion_usage"]["completion_tokens"] == 5
                assert all(item["text"] for item in items)
                # Its events tell of four blocks, one after another; its usage confirms three.
                end = time.monotonic() + 30
                while (await router.dump_events()).count('"tokens_hash"') < 4:
                    assert time.monotonic() < end
                    await asyncio.sleep(0.01)
                again = await router.generate(prompt, model="served", request_id="again")
                assert (again.worker_id, again.overlap_blocks) == (home, 4)
                last = [item async for item in again][-1]
                assert last["completion_usage"]["prompt_tokens_details"]["cached_tokens"] == 48
                adapter = await router.generate(prompt, model="served", lora_name="sql")
                assert [item async for item in adapter]
                wrong = await router.generate(prompt, model="other")
                with pytest.raises(NotFoundError, match="`other` does not exist"):
                    await anext(wrong)
                assert router.totals()["requests"] == 0
            client = await endpoint.client()
            stream = await client.round_robin({"token_ids": prompt})
            assert sum([len(item["token_ids"]) async for item in stream]) == 16
        await discovery.close()

    asyncio.run(ask())


def completion(first):
    return {"model": "served", "prompt": list(range(first, first + 65)), "max_tokens": 1}


@pytest.mark.parametrize("kind", ["jetstream", "nats"])
def test_events_of_a_launched_engine_are_relayed_to_nats(kind, launch, folder, nats, monkeypatch):
    engine, flags = ("vllm", []) if kind == "jetstream" else ("sglang", ["--enable-local-indexer"])
    process = launch(
        engine, "--model", "some/model", "--served-model-name", "served", "--page-size", "16",
        "--event-plane", "nats", *flags, NATS_SERVER=nats.url,
    )  # fmt: skip
    line = ready(process, engine)
    number = line["instance_id"]
    where = found(folder)[f"v1/events/dynamo/backend/{number}/0"]
    assert (where["kind"], where["replay_endpoint"], where["block_size"]) == (kind, None, 16)
    assert where["endpoint"].startswith(f"{kind}://")
    assert where["endpoint"].endswith(f"/{number}/0")
    assert line["events"] == [where["endpoint"]]
    # Before there is a frontend: the stream, or the launcher's index, tells it later.
    client = Http(line["url"])
    client.post("/v1/completions", completion(0))
    client.close()
    env = {"KVFLASH_DISCOVERY_DIR": str(folder), "NATS_SERVER": nats.url}
    with FrontendProcess("--discovery", "file", "--event-plane", "nats", env=env) as frontend:
        frontend.wait_healthy(number)
        held = {number: 4}
        until(lambda: frontend.overlaps(completion(0)) == held, "what was before")
        ask(frontend.url, COMPLETIONS, completion(1_000))
        until(lambda: frontend.overlaps(completion(1_000)) == held, "what came since")
        answer = ask(frontend.url, COMPLETIONS, completion(0))
        assert (answer.status, answer.headers["x-kvflash-overlap-blocks"]) == (200, "4")
        assert frontend.http.get("/health")["warnings"] == []
    monkeypatch.setenv("KVFLASH_EVENT_PLANE", "nats")
    monkeypatch.setenv("NATS_SERVER", nats.url)

    async def choose():
        discovery = open_discovery("file", folder=folder)
        async with DistributedRuntime(discovery) as runtime:
            endpoint = runtime.endpoint("dynamo.backend.generate")
            async with KvPushRouter(endpoint, 16, KvRouterConfig()) as router:
                end = time.monotonic() + 30
                while await router.best_worker(list(range(64))) != (number, 0, 4):
                    assert time.monotonic() < end
                    await asyncio.sleep(0.01)
        await discovery.close()

    asyncio.run(choose())
    assert process.terminate() == 0
    assert found(folder) == {}


def test_health_tells_of_events_over_nats_only_what_is_wrong(launch, folder, nats):
    process = launch("vllm", "m", "--event-plane", "nats", NATS_SERVER=nats.url)
    number = ready(process, "vllm")["instance_id"]
    place = found(folder)[f"v1/events/dynamo/backend/{number}/0"]["endpoint"]
    env = {"KVFLASH_DISCOVERY_DIR": str(folder), "NATS_SERVER": nats.url}
    lost = (
        f"worker {number}: its events are at {place}, which needs --event-plane nats on this "
        "frontend, so its cache is unknown and earns no credit"
    )
    # The engine has said nothing yet, and need not have.
    for flags, warnings in ((["--event-plane", "nats"], []), ([], [lost])):
        with FrontendProcess("--discovery", "file", *flags, env=env) as frontend:
            frontend.wait_healthy(number)
            assert frontend.http.get("/health")["warnings"] == warnings


def test_a_nats_that_is_missing_is_named_before_the_engine_starts(launch):
    url = f"nats://127.0.0.1:{free_port()}"
    process = launch("vllm", "m", "--event-plane", "nats", NATS_SERVER=url)
    assert process.popen.wait(30) == 1
    process.close()
    [said] = [line for line in process.errors if "vllm: error: " in line]
    assert "NATS_SERVER" in said and "nats-server -js" in said
    assert not any("starting" in line for line in process.errors)


def test_what_needs_nats_is_said_to_have_no_effect_without(launch):
    process = launch("vllm", "m", "--enable-local-indexer", NATS_SERVER="nats://127.0.0.1:1")
    ready(process, "vllm")
    for name in ("--enable-local-indexer has no effect", "NATS_SERVER has no effect on KV events"):
        assert sum(f"{name} without --event-plane nats" in line for line in process.errors) == 1
