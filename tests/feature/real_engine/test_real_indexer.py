"""Two replicas of the indexer and two real vLLM engines: each request's reuse is predicted before
it is sent, and compared with the engine's own count. Opt-in, see support_engines.py."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import dataclass, field

import pytest
import zmq

from replica import LossyProxy, Replica
from service import listener, until
from support_engines import BLOCK_SIZE, MODEL, conversations, needs_engines, vllm_engines, words

pytestmark = needs_engines

SALT = "tenant-a"


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    with vllm_engines(tmp_path_factory.mktemp("engines")) as started:
        yield started


@dataclass
class Count:
    """Comparisons of one phase; one prediction per request and replica."""

    phase: str
    requests: int = 0
    predictions: int = 0
    equal: int = 0
    # Asked while the newest frame was lost on the way to that replica: it can't know yet.
    behind: int = 0
    behind_equal: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    salted: int = 0
    wrong: list = field(default_factory=list)


class Fleet:
    """The engines, two replicas that follow them, and what is known of both."""

    def __init__(self, run, engines, *, share=None, seed=1):
        self.engines = engines
        self._run = run
        self._context = zmq.Context()
        self._rng = random.Random(seed)
        self._newest = dict.fromkeys(range(len(engines)), -1)
        # By replica, by engine.
        self.proxies = [
            [LossyProxy(engine.endpoint, seed * 100 + 10 * r + n, share) for n, engine in pairs]
            for r, pairs in enumerate([list(enumerate(engines))] * 2)
            if share is not None
        ]
        self.replicas = []
        self.replicas.append(self.replica(0))
        self.replicas.append(self.replica(1, [self.replicas[0].url]))

    def replica(self, place, peers=()):
        workers = [
            {
                "instance_id": number + 1,
                "endpoint": self.proxies[place][number].endpoint
                if self.proxies
                else engine.endpoint,
                "replay_endpoint": engine.replay_endpoint,
                "model_name": MODEL,
                "block_size": BLOCK_SIZE,
            }
            for number, engine in enumerate(self.engines)
        ]
        return Replica(self._run, workers, peers)

    def replace(self, place):
        """Kill a replica; a new one recovers from the other."""
        self.replicas[place].kill()
        self.replicas[place] = self.replica(place, [self.replicas[1 - place].url])

    def restart_engine(self, number):
        engine = self.engines[number]
        engine.kill()
        engine.start()
        engine.wait_until_up()
        self._newest[number] = -1

    def settle(self, number):
        """Wait for what the engine has published to be applied: is a replica up to date?

        One that waits for a frame that was lost is not, and nothing but the next frame tells it.
        """
        newest = self.engines[number].newest_batch(self._context, self._newest[number])
        self._newest[number] = newest
        return [self._settle(place, number, newest) for place in range(2)]

    def _settle(self, place, number, newest):
        proxy = self.proxies[place][number] if self.proxies else None

        def applied():
            last = listener(self.replicas[place].http, number + 1)["last_sequence"]
            return -1 if last is None else last

        def is_settled():
            if applied() == newest:
                return True
            if proxy is None or proxy.newest_seen is None or proxy.newest_seen < newest:
                return False
            return proxy.newest_carried is None or applied() >= proxy.newest_carried

        until(is_settled, f"replica {place} to be at batch {newest} of engine {number}")
        return applied() == newest

    def settle_all(self):
        """As `settle` for both engines, with more batches until what was lost shows."""
        for number, engine in enumerate(self.engines):
            tries = 0
            while not all(self.settle(number)):
                tries += 1
                assert tries < 50
                body = {"model": MODEL, "prompt": words(self._rng, 40), "max_tokens": 1}
                engine.post("/v1/completions", body)

    def check(self):
        """A checkpoint: both replicas hold the same, and believe it."""
        self.settle_all()
        first, second = (replica.http.get("/digest") for replica in self.replicas)
        assert first == second
        assert len(first) == 1
        assert first[0]["workers"], "nothing is held"
        for replica in self.replicas:
            for number in range(len(self.engines)):
                entry = listener(replica.http, number + 1)
                assert entry["trust"] == {"state": "exact", "reasons": []}, entry
                assert entry["events"]["lost_batches"] == 0, entry
                assert entry["events"]["orphaned"] == 0, entry
        return first[0]

    def events(self, place, number):
        return listener(self.replicas[place].http, number + 1)["events"]

    def matched(self, place, number, token_ids, salt):
        body = {"model_name": MODEL, "token_ids": token_ids}
        if salt is not None:
            body["cache_salt"] = salt
        answer = self.replicas[place].http.post("/query", body)
        return answer["instances"][str(number + 1)]["gpu"]

    def ask(self, count, number, messages, salt):
        """Predict, send, compare; the engine's answer."""
        engine = self.engines[number]
        ids = engine.post("/tokenize", {"model": MODEL, "messages": messages})["tokens"]
        is_current = self.settle(number)
        matched = [self.matched(place, number, ids, salt) for place in range(2)]
        body = {"model": MODEL, "messages": messages, "max_tokens": 12, "temperature": 0}
        if salt is not None:
            body["cache_salt"] = salt
        answer = engine.post("/v1/chat/completions", body)
        usage = answer["usage"]
        assert usage["prompt_tokens"] == len(ids)
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        # The last token of a prompt is computed in any case.
        reusable = (len(ids) - 1) // BLOCK_SIZE * BLOCK_SIZE
        count.requests += 1
        count.salted += salt is not None
        count.prompt_tokens += len(ids)
        count.reused_tokens += cached
        for place in range(2):
            is_equal = min(matched[place], reusable) == cached
            if not is_current[place]:
                count.behind += 1
                count.behind_equal += is_equal
                continue
            count.predictions += 1
            count.equal += is_equal
            if not is_equal:
                facts = {"replica": place, "engine": number, "request": count.requests}
                facts |= {"prompt": len(ids), "matched": matched[place], "cached": cached}
                count.wrong.append(facts | {"salt": salt, "batch": self._newest[number]})
        return answer["choices"][0]["message"]["content"]

    def converse(self, phase, *, seed, count=12, turns=4):
        """Growing conversations, every third one salted, each turn at the other engine."""
        counted = Count(phase)
        for number, talk, question in conversations(seed, count, turns):
            talk.append({"role": "user", "content": question})
            turn = len(talk) // 2
            salt = SALT if number % 3 == 0 else None
            text = self.ask(counted, (number + turn) % 2, talk, salt)
            talk.append({"role": "assistant", "content": text})
        print(json.dumps(vars(counted)))
        assert counted.requests == count * turns
        assert counted.reused_tokens > 0, "nothing to predict"
        assert counted.wrong == []
        assert counted.equal + counted.behind == 2 * counted.requests
        return counted

    def close(self):
        for replica in self.replicas:
            replica.kill()
        for proxy in (proxy for proxies in self.proxies for proxy in proxies):
            proxy.close()
        self._context.term()


def held(digest):
    """Blocks by instance; who has none is not in it."""
    return {worker["instance_id"]: worker["blocks"] for worker in digest["workers"]}


@pytest.fixture
def fleet(run, engines):
    made = []

    def make(**settings):
        made.append(Fleet(run, engines, **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_predictions_are_what_engines_reuse(fleet):
    fleet = fleet()
    print()
    first = fleet.converse("two replicas", seed=1)
    assert 0 < first.reused_tokens < first.prompt_tokens
    fleet.check()
    fleet.converse("two replicas, goes on", seed=1)
    fleet.check()
    for number in range(2):
        assert fleet.events(0, number)["removed_blocks"] > 0, "nothing was evicted"

    # A conversation is as another one under another salt.
    talk = [{"role": "system", "content": words(random.Random(2), 70)}]
    salts = Count("one prompt, four salts, twice")
    for salt in (None, "a", "b", SALT) * 2:
        fleet.ask(salts, 0, talk, salt)
    print(json.dumps(vars(salts)))
    assert salts.wrong == []
    assert salts.reused_tokens == salts.prompt_tokens // 8 // BLOCK_SIZE * BLOCK_SIZE * 4

    before = held(fleet.check())
    assert before[1] > 100
    fleet.engines[0].clear()
    assert held(fleet.check()) == {2: before[2]}
    fleet.converse("after a clear", seed=1)
    fleet.check()


def test_a_killed_replica_recovers_from_the_other(fleet):
    fleet = fleet()
    fleet.converse("before the kill of a replica", seed=4)
    before = fleet.check()
    for place in (1, 0):
        fleet.replace(place)
        assert fleet.check() == before
        recovery = fleet.replicas[place].http.get("/ready")["recovery"]
        assert (recovery["phase"], recovery["errors"], recovery["skipped"]) == ("done", [], [])
        assert recovery["blocks"] == sum(held(before).values())
        fleet.converse(f"after the kill of replica {place}", seed=4)
        before = fleet.check()


def test_a_killed_engine_takes_its_blocks_along(fleet):
    fleet = fleet()
    fleet.converse("before the kill of an engine", seed=5)
    before = held(fleet.check())
    assert set(before) == {1, 2}
    fleet.restart_engine(0)

    def is_gone(replica):
        workers = {w["instance_id"]: w for w in replica.http.get("/workers")}
        return workers[1]["status"] == "active" and workers[1]["blocks"] == 0

    for replica in fleet.replicas:
        until(lambda replica=replica: is_gone(replica), "the old process's blocks to go")
        assert listener(replica.http, 2)["device_blocks"] == before[2]
    fleet.converse("after the kill of an engine", seed=5)
    fleet.check()
    assert fleet.events(0, 0)["restarts"] == fleet.events(1, 0)["restarts"] == 1


def test_lost_frames_are_replayed(fleet):
    fleet = fleet(share=0.05)
    for seed in (6, 7, 8):
        fleet.converse("one frame in twenty is lost", seed=seed)
        fleet.check()
    proxies = [proxy for proxies in fleet.proxies for proxy in proxies]
    repaired = [fleet.events(place, n)["repaired_batches"] for place in range(2) for n in range(2)]
    carried, lost = sum(p.carried for p in proxies), sum(p.lost for p in proxies)
    print(json.dumps({"carried": carried, "lost": lost, "repaired_batches": repaired}))
    assert lost > 0, "nothing was lost"
    fleet.replace(1)
    fleet.check()
    fleet.converse("and a replica was killed", seed=8)
    fleet.check()


def test_the_doctor_finds_nothing_to_cure(fleet):
    fleet = fleet()
    fleet.converse("before the doctor", seed=9)
    fleet.check()
    urls = [each.url for each in (*fleet.replicas, *fleet.engines)]
    command = [sys.executable, "-m", "kvflash.doctor", "--json", *urls]
    answer = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    assert len(answer["findings"]) > 20
    assert [finding for finding in answer["findings"] if finding["level"] != "ok"] == []
