"""A recorded vLLM timeline, replayed through the indexer's sockets and HTTP API.

The engine's own count of reused tokens is the judge: the index, fed with the frames up to a
request, must predict it. Only the first request after each cache reset may differ, because the
engine publishes the clear with its next step.
"""

from __future__ import annotations

import msgpack
import pytest
import zmq

from service import VECTORS, until

BLOCK_SIZE = 32
# Start parameters of these engines.
CAPACITY_BLOCKS = 160


class Publisher:
    """An engine's PUB socket."""

    def __init__(self, make_socket):
        self.pub = make_socket(zmq.XPUB)
        port = self.pub.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"

    def wait_for_subscriber(self):
        assert self.pub.poll(10_000), "nobody subscribed"
        assert self.pub.recv() == b"\x01"


def load(name):
    with (VECTORS / name).open("rb") as file:
        return list(msgpack.Unpacker(file, raw=False, strict_map_key=False))


@pytest.mark.parametrize("name", ["vllm_0_32_timeline.msgpack"])
def test_overlap_is_the_engines_own_count(name, run, client, zmq_socket):
    records = load(name)
    instances = sorted({record["instance"] for record in records})
    assert len(records) > 1000
    assert len(instances) == 2

    process = run("kvflash.indexer", "--port", "0", "--host", "127.0.0.1")
    indexer = client(process.ready()["url"])
    publishers = {}
    for instance in instances:
        publisher = publishers[instance] = Publisher(zmq_socket)
        indexer.post(
            "/register",
            {
                "instance_id": instance,
                "endpoint": publisher.endpoint,
                "model_name": "tiny-llama",
                "block_size": BLOCK_SIZE,
                "capacity_blocks": CAPACITY_BLOCKS,
            },
            expect=201,
        )
        publisher.wait_for_subscriber()

    def applied(instance, sequence):
        workers = {w["instance_id"]: w for w in indexer.get("/workers")}
        return workers[instance]["listeners"]["0"]["last_sequence"] == sequence

    predicted, right, asked, after_reset, wrong = {}, 0, 0, set(), []
    last_sequence, behind = {}, set()
    for record in records:
        kind, instance = record["kind"], record["instance"]
        if kind == "frames":
            publishers[instance].pub.send_multipart(record["parts"])
            last_sequence[instance] = int.from_bytes(record["parts"][1], "big")
            behind.add(instance)
        elif kind == "reset":
            after_reset.add(instance)
        elif kind == "request":
            for late in behind:
                until(lambda late=late: applied(late, last_sequence[late]), f"frames of {late}")
            behind.clear()
            query = {"token_ids": record["token_ids"], "model_name": "tiny-llama"}
            if record["cache_salt"] is not None:
                query["cache_salt"] = record["cache_salt"]
            answer = indexer.post("/query", query)
            reusable = (len(record["token_ids"]) - 1) // BLOCK_SIZE * BLOCK_SIZE
            predicted[instance] = min(answer["scores"][str(instance)]["0"], reusable)
            assert answer["instances"][str(instance)]["gpu"] == answer["scores"][str(instance)]["0"]
        else:
            asked += 1
            if predicted[instance] == record["cached_tokens"]:
                right += 1
            elif instance not in after_reset:
                wrong.append((predicted[instance], record["cached_tokens"]))
            after_reset.discard(instance)
    assert asked == 297
    assert wrong == []
    assert right >= 294
    # Nor did it ever doubt a stream that was right.
    for worker in indexer.get("/workers"):
        assert worker["trust"] == {"state": "exact", "reasons": []}
        assert 0 < worker["listeners"]["0"]["device_blocks"] <= CAPACITY_BLOCKS
    assert not [line for line in process.errors if "not exact" in line]
