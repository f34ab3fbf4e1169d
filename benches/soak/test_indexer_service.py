"""The indexer under load and churn: engines store, evict, restart, come and go while clients ask
everything there is. No 5xx, no panic, and memory that settles.

``make soak``; KVFLASH_SOAK_SECONDS sets how long (default 60, ``make soak`` takes 600).
"""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from pathlib import Path

import msgpack
import zmq

SECONDS = float(os.environ.get("KVFLASH_SOAK_SECONDS", "60"))
BLOCK_SIZE, ENGINES, CLIENTS, CAPACITY = 16, 8, 4, 4_096

FLAGS = ["--host", "127.0.0.1", "--port", "0", "--threads", "2"]
FLAGS += ["--index-memory", "64MiB", "--log-level", "error"]


class Engine(threading.Thread):
    """Publishes conversations that grow, and evicts the oldest; restarts now and then."""

    def __init__(self, number, stop):
        super().__init__(daemon=True)
        self.number, self._stop_event = number, stop
        self._socket = zmq.Context.instance().socket(zmq.PUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"

    def run(self):
        rng = random.Random(self.number)
        sequence, name, held = 0, self.number << 40, deque()
        while not self._stop_event.wait(0.002):
            if rng.random() < 0.0005:
                sequence, held = 0, deque()  # a new life
            conversation = rng.randrange(64)
            blocks = rng.randint(1, 16)
            names = list(range(name, name + blocks))
            name += blocks
            tokens = [conversation, *range(blocks * BLOCK_SIZE - 1)]
            events = [["BlockStored", names, None, tokens, BLOCK_SIZE, None, "GPU"]]
            held.append(names)
            while len(held) * 8 > CAPACITY:
                events.append(["BlockRemoved", held.popleft()[::-1], "GPU"])
            if rng.random() >= 0.01:  # some are lost on the way
                head = sequence.to_bytes(8, "big")
                self._socket.send_multipart([b"kv", head, msgpack.packb([time.time(), events, 0])])
            sequence += 1
        self._socket.close(0)


def call(connection, method, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    connection.request(method, path, data, {"content-type": "application/json"})
    response = connection.getresponse()
    response.read()
    return response.status


def client(port, number, engines, stop, statuses):
    rng = random.Random(1_000 + number)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    prompt = list(range(1_900))
    while not stop.is_set():
        prompt[0] = rng.randrange(64)
        query = {"model_name": "m", "token_ids": prompt}
        dice = rng.random()
        if dice < 0.90:
            status = call(connection, "POST", "/query", query)
        elif dice < 0.93:
            hashes = [rng.randrange(2**64) for _ in range(100)]
            body = {"model_name": "m", "block_hashes": hashes}
            status = call(connection, "POST", "/query_by_hash", body)
        elif dice < 0.95:
            status = call(connection, "POST", "/query", {**query, "token_ids": [-1]})
        elif dice < 0.97:
            path = rng.choice(["/workers", "/metrics", "/ready", "/peers", "/openapi.json"])
            status = call(connection, "GET", path)
        elif dice < 0.975:
            status = call(
                connection, "GET", rng.choice(["/dump", "/dump?format=snapshot", "/digest"])
            )
        elif number == 0 and dice < 0.98:
            engine = rng.choice(engines)
            body = {"instance_id": engine.number, "model_name": "m"}
            status = call(connection, "POST", "/unregister", body)
            statuses[status] += 1
            status = call(connection, "POST", "/register", registration(engine))
        else:
            continue
        statuses[status] += 1
    connection.close()


def registration(engine):
    return {
        "instance_id": engine.number,
        "endpoint": engine.endpoint,
        "model_name": "m",
        "block_size": BLOCK_SIZE,
    }


def resident_mib(pid):
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_the_indexer_stays_up_and_of_one_size():
    process = subprocess.Popen(
        [sys.executable, "-m", "kvflash.indexer", *FLAGS],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Each of the C library's arenas keeps what it once needed: with many, memory settles late.
        env={**os.environ, "MALLOC_ARENA_MAX": "2"},
    )
    stop = threading.Event()
    engines = [Engine(number + 1, stop) for number in range(ENGINES)]
    statuses = Counter()
    threads = []
    port = int(json.loads(process.stdout.readline())["url"].rsplit(":", 1)[1])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        for engine in engines:
            assert call(connection, "POST", "/register", registration(engine)) == 201
            engine.start()
        threads = [
            threading.Thread(target=client, args=(port, n, engines, stop, statuses))
            for n in range(CLIENTS)
        ]
        for thread in threads:
            thread.start()
        samples, indexed = [], []
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            time.sleep(SECONDS / 100)
            assert process.poll() is None, "the indexer ended"
            samples.append(resident_mib(process.pid))
            connection.request("GET", "/metrics")
            page = connection.getresponse().read().decode()
            indexed.append(
                float(re.search(r"^kvflash_kvindexer_index_bytes\S* (\S+)", page, re.M)[1])
            )
    finally:
        stop.set()
        for thread in [*threads, *engines]:
            if thread.ident is not None:
                thread.join(30)
        connection.close()
        process.terminate()
        _, errors = process.communicate(timeout=30)
    settled = max(samples[len(samples) // 5 : len(samples) // 2])
    late = max(samples[len(samples) // 2 :])
    print(f"\n{SECONDS:g} s, answers {dict(statuses)}; resident {settled:.1f} MiB settled, "
          f"{late:.1f} MiB late; index {indexed[len(indexed) // 2] / 2**20:.1f} MiB halfway, "
          f"{indexed[-1] / 2**20:.1f} at the end")  # fmt: skip
    assert process.returncode == 0
    assert "panicked" not in errors, errors
    assert all(status < 500 or status == 503 for status in statuses), statuses
    assert statuses[503] <= 0.001 * sum(statuses.values()), "only dumps beyond their limit"
    assert statuses[200] > 1_000 and statuses[400] > 0 and statuses[201] > 0, statuses
    assert late <= 1.05 * settled
