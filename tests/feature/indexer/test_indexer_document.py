"""The commands of the published document, as they are printed there.

Package, host and port are put in, and the engines' addresses, since the document's do not exist;
everything else is the text. Each is run by curl, and by a reader of the few options that it uses,
for machines without curl.
"""

from __future__ import annotations

import http.client
import json
import re
import shlex
import shutil
import subprocess
from urllib.parse import urlsplit

import pytest

from service import Engine, batch, stored, until, wait_for_sequence

SIZE = 16
MODEL = "llama-3-8b"

HEALTH = "curl http://localhost:8090/health"
METRICS = "curl http://localhost:8090/metrics"
REGISTER = """curl -X POST http://localhost:8090/register \\
  -H 'Content-Type: application/json' \\
  -d '{
    "instance_id": 1,
    "endpoint": "tcp://127.0.0.1:5557",
    "model_name": "llama-3-8b",
    "block_size": 16
  }'"""
REGISTER_TENANT = """curl -X POST http://localhost:8090/register \\
  -H 'Content-Type: application/json' \\
  -d '{
    "instance_id": 2,
    "endpoint": "tcp://127.0.0.1:5558",
    "model_name": "llama-3-8b",
    "tenant_id": "customer-a",
    "block_size": 16,
    "dp_rank": 0
  }'"""
UNREGISTER = """curl -X POST http://localhost:8090/unregister \\
  -H 'Content-Type: application/json' \\
  -d '{"instance_id": 1, "model_name": "llama-3-8b"}'"""
UNREGISTER_TENANT = """curl -X POST http://localhost:8090/unregister \\
  -H 'Content-Type: application/json' \\
  -d '{"instance_id": 1, "model_name": "llama-3-8b", "tenant_id": "customer-a"}'"""
UNREGISTER_RANK = """curl -X POST http://localhost:8090/unregister \\
  -H 'Content-Type: application/json' \\
  -d '{"instance_id": 1, "model_name": "llama-3-8b", "tenant_id": "default", "dp_rank": 0}'"""
WORKERS = "curl http://localhost:8090/workers"
QUERY = """curl -X POST http://localhost:8090/query \\
  -H 'Content-Type: application/json' \\
  -d '{"token_ids": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16], "model_name": "llama-3-8b"}'"""  # noqa: E501
QUERY_BY_HASH = """curl -X POST http://localhost:8090/query_by_hash \\
  -H 'Content-Type: application/json' \\
  -d '{"block_hashes": [123456, 789012], "model_name": "llama-3-8b"}'"""
DUMP = "curl http://localhost:8090/dump"
REGISTER_PEER = """curl -X POST http://localhost:8090/register_peer \\
  -H 'Content-Type: application/json' \\
  -d '{"url": "http://peer:8091"}'"""
DEREGISTER_PEER = """curl -X POST http://localhost:8090/deregister_peer \\
  -H 'Content-Type: application/json' \\
  -d '{"url": "http://peer:8091"}'"""
PEERS = "curl http://localhost:8090/peers"
REPLICA_A = """python -m dynamo.indexer --port 8090 --block-size 16 \\
  --workers "1=tcp://worker1:5557,2=tcp://worker2:5558\""""
REPLICA_B = """python -m dynamo.indexer --port 8091 --block-size 16 \\
  --workers "1=tcp://worker1:5557,2=tcp://worker2:5558" \\
  --peers "http://localhost:8090\""""
ALL_FLAGS = """python -m dynamo.indexer --port 8090 --threads 4 --block-size 16 \\
  --model-name my-model --tenant-id default \\
  --workers "1=tcp://host:5557,2:1=tcp://host:5558\""""


def words(command):
    return shlex.split(command.replace("\\\n", " "))


def by_curl(command):
    """Status and body, from curl."""
    [curl, *rest] = words(command)
    output = [curl, "-sS", "--max-time", "30", "-w", "\n%{http_code}", *rest]
    done = subprocess.run(output, capture_output=True, text=True, check=True)
    body, _, status = done.stdout.rpartition("\n")
    return int(status), body


def by_hand(command):
    """Status and body, by the options that the document uses."""
    [curl, *rest] = words(command)
    assert curl == "curl"
    method, headers, body, url = "GET", {}, None, ""
    options = iter(rest)
    for word in options:
        if word == "-X":
            method = next(options)
        elif word == "-H":
            name, _, value = next(options).partition(": ")
            headers[name] = value
        elif word == "-d":
            body = next(options)
        else:
            url = word
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=30)
    connection.request(method, parts.path, body, headers)
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, text


NO_CURL = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


@pytest.fixture(params=[pytest.param(by_curl, marks=NO_CURL), by_hand], ids=["curl", "by hand"])
def send(request, run, engines):
    """Runs a printed command against a process of the test's own; status and parsed answer."""
    process = run("kvflash.indexer", "--port", "0", "--host", "127.0.0.1", "--log-level", "error")
    url = process.ready()["url"]

    def call(command):
        assert "http://localhost:8090" in command
        command = command.replace("http://localhost:8090", url)
        for port, engine in zip((5557, 5558), engines, strict=True):
            command = command.replace(f"tcp://127.0.0.1:{port}", engine.endpoint)
        status, text = request.param(command)
        return status, json.loads(text) if text[:1] in {"{", "["} else text

    return call


@pytest.fixture
def engines():
    made = [Engine(replay=False), Engine(replay=False)]
    yield made
    for engine in made:
        engine.close()


def publish(engine, tokens, name=1):
    event = stored(range(name, name + len(tokens) // SIZE), tokens, block_size=SIZE)
    return engine.publish(batch(event))


def test_health_and_metrics(send):
    assert send(HEALTH) == (200, "")
    status, text = send(METRICS)
    assert status == 200
    assert re.search(r"^# TYPE \w+_request_duration_seconds histogram$", text, re.MULTILINE)


def test_registering_listing_and_unregistering(send, engines):
    assert send(REGISTER) == (201, {"status": "ok"})
    assert send(REGISTER_TENANT) == (201, {"status": "ok"})
    assert send(REGISTER)[0] == 409
    until(lambda: all(w["status"] == "active" for w in send(WORKERS)[1]), "both engines")
    status, listed = send(WORKERS)
    assert status == 200
    for instance, (worker, engine) in enumerate(zip(listed, engines, strict=True), 1):
        wanted = {
            "instance_id": instance,
            "source": "zmq",
            "status": "active",
            "endpoints": {"0": engine.endpoint},
        }
        assert {name: worker[name] for name in wanted} == wanted
        said = worker["listeners"]["0"]
        assert (said["endpoint"], said["status"]) == (engine.endpoint, "active")
    # Instance 1 is not customer-a's.
    status, refusal = send(UNREGISTER_TENANT)
    assert status == 404
    assert "customer-a" in refusal["error"]
    assert send(UNREGISTER_RANK)[0] == 200
    assert send(REGISTER)[0] == 201
    assert send(UNREGISTER)[0] == 200
    assert send(UNREGISTER)[0] == 404
    assert [worker["instance_id"] for worker in send(WORKERS)[1]] == [2]


def test_asking(send, engines):
    assert send(QUERY) == (404, {"error": f"no indexer for model={MODEL} tenant=default"})
    send(REGISTER)
    engines[0].wait_for_subscriber()
    publish(engines[0], range(1, 33))
    wanted = {
        "scores": {"1": {"0": 16}},
        "frequencies": [1],
        "instances": {
            "1": {"longest_matched": 16, "gpu": 16, "dp": {"0": 16}, "cpu": 16, "disk": 16}
        },
    }
    until(lambda: send(QUERY) == (200, wanted), "the block")
    status, answer = send(QUERY_BY_HASH)
    assert (status, answer["scores"], answer["frequencies"]) == (200, {"1": {"0": 0}}, [])
    assert set(answer["instances"]["1"]) == set(wanted["instances"]["1"])


def test_dumping(send, engines):
    for command in (REGISTER, REGISTER_TENANT):
        send(command)
    for engine in engines:
        engine.wait_for_subscriber()
        publish(engine, range(1, 17))
    keys = {f"{MODEL}:default", f"{MODEL}:customer-a"}
    until(lambda: all(len(m["events"]) == 1 for m in send(DUMP)[1].values()), "both blocks")
    status, dump = send(DUMP)
    assert (status, set(dump)) == (200, keys)
    for key in keys:
        assert dump[key]["block_size"] == 16
        [event] = dump[key]["events"]
        assert event["event"]["data"]["stored"]["parent_hash"] is None


def test_peers(send):
    assert send(REGISTER_PEER)[0] == 201
    assert send(PEERS) == (200, ["http://peer:8091"])
    assert send(DEREGISTER_PEER)[0] == 200
    assert send(DEREGISTER_PEER) == (404, {"error": "peer not found"})
    assert send(PEERS) == (200, [])


def flags_of(command, engines):
    """Arguments of a printed command line: its own port is free, its engines are ours."""
    [python, dash_m, package, *flags] = words(command)
    assert (python, dash_m, package) == ("python", "-m", "dynamo.indexer")
    first, second = (engine.endpoint for engine in engines)
    text = "\n".join(flags)
    text = re.sub(r"^(--port)\n\d+$", r"\1\n0", text, flags=re.MULTILINE)
    text = re.sub(r"tcp://\w+:5557", first, text)
    text = re.sub(r"tcp://\w+:5558", second, text)
    return [*text.split("\n"), "--host", "127.0.0.1"]


@pytest.mark.parametrize(
    "case",
    [(REPLICA_A, "default", (0, 0)), (ALL_FLAGS, "my-model", (0, 1))],
    ids=["replica A", "all flags"],
)
def test_printed_command_lines(run, client, engines, case):
    command, model, ranks = case
    http = client(run("kvflash.indexer", *flags_of(command, engines)).ready()["url"])
    for instance, (engine, rank) in enumerate(zip(engines, ranks, strict=True), 1):
        engine.wait_for_subscriber()
        wait_for_sequence(http, instance, publish(engine, range(1, 33)), rank)
    answer = http.post("/query", {"token_ids": list(range(1, 49)), "model_name": model})
    assert answer["scores"] == {"1": {"0": 32}, "2": {str(ranks[1]): 32}}


def test_the_second_replica_recovers_from_the_first(run, client, engines):
    first = run("kvflash.indexer", *flags_of(REPLICA_A, engines)).ready()["url"]
    http = client(first)
    for instance, engine in enumerate(engines, 1):
        engine.wait_for_subscriber()
        wait_for_sequence(http, instance, publish(engine, range(1, 33)))
    flags = flags_of(REPLICA_B.replace("http://localhost:8090", first), engines)
    http = client(run("kvflash.indexer", *flags).ready()["url"])
    body = {"token_ids": list(range(1, 49)), "model_name": "default"}
    wanted = {"1": {"0": 32}, "2": {"0": 32}}
    until(lambda: http.post("/query", body)["scores"] == wanted, "what the first one holds")
