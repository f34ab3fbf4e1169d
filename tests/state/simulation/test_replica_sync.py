"""Replica sync in a world that loses, repeats, reorders, cuts and forges.

Views converge, and load returns to zero.
"""

from __future__ import annotations

import heapq
import json
import random
from collections import Counter
from collections.abc import Sequence
from unittest.mock import patch

import pytest
from seeds import ONE_SEED, SEEDS, play_all

from kvflash.routing import replica_sync
from kvflash.routing.replica_sync import ReplicaSync

TICK_S = 0.1
# More than the time between two digests.
DIGEST_STEPS = 25


class Load:
    """Bookings that count blocks and tokens to be prefilled, and refuse nonsense."""

    def __init__(self) -> None:
        self.requests: dict[tuple[int, str], list[object]] = {}

    def remote_add(  # noqa: PLR0917 - called with positions by the core
        self,
        router_id: int,
        request_id: str,
        worker: tuple[int, int],
        hashes: Sequence[int] | None,
        isl: int,
        overlap: int,
    ) -> None:
        assert (router_id, request_id) not in self.requests, "counted twice"
        self.requests[router_id, request_id] = [worker, tuple(hashes or ()), isl - overlap * 4]

    def remote_prefilled(self, router_id: int, request_id: str) -> None:
        self.requests[router_id, request_id][2] = 0

    def remote_free(self, router_id: int, request_id: str) -> None:
        del self.requests[router_id, request_id]

    def remote_drop_router(self, router_id: int) -> None:
        for key in [key for key in self.requests if key[0] == router_id]:
            del self.requests[key]

    def remote_heard(self, router_id: int) -> None:
        pass


def active(sync: ReplicaSync) -> dict[int, dict[str, tuple[int, int]]]:
    """Active requests by router, including this one: request id to worker."""
    tables = {router_id: peer.table for router_id, peer in sync._peers.items()}
    return {
        router_id: {name: request.worker for name, request in table.requests.items()}
        for router_id, table in (tables | {sync.router_id: sync._own}).items()
    }


class Router:
    def __init__(self, router_id: int) -> None:
        self.load = Load()
        self.sync = ReplicaSync(router_id, self.load)
        self.requests: dict[str, bool] = {}
        self.count = 0
        self.cut_until = 0.0

    def act(self, dice: random.Random, *, is_ending: bool) -> None:
        """Begin, prefill or end a request."""
        roll = dice.random()
        if not is_ending and roll < 0.5:
            self.count += 1
            name = f"{self.sync.router_id}-{self.count}"
            self.requests[name] = False
            hashes = None if dice.random() < 0.2 else [self.count, 7]
            self.sync.add(name, (dice.randint(1, 3), 0), hashes, 16, dice.randint(0, 2))
        elif self.requests:
            name = dice.choice(list(self.requests))
            if roll < 0.7 and not self.requests[name] and not is_ending:
                self.requests[name] = True
                self.sync.mark_prefill_completed(name)
            else:
                del self.requests[name]
                self.sync.free(name)


def play(seed: int) -> Counter[str]:
    dice = random.Random(seed)
    limits = {"WAITING_EVENTS_MAX": [3, 100], "STATE_PART_BYTES": [1, 100, 100_000]}
    chosen = {name: dice.choice(values) for name, values in limits.items()}
    with patch.multiple(replica_sync, **chosen):
        return play_with(dice, seed)


def play_with(dice: random.Random, seed: int) -> Counter[str]:
    lose, repeat = dice.choice([0, 0.05, 0.3]), dice.choice([0, 0.1])
    late, cut = dice.choice([0.01, 1.0]), dice.choice([0, 0.01])
    forge = dice.choice([0, 0.01])
    on_way: list[tuple[float, int, int, bytes]] = []
    routers: dict[int, Router] = {}
    seen: Counter[str] = Counter()
    now, number, next_id = 0.0, 0, 1

    def send(sender: Router, *, is_calm: bool) -> None:
        nonlocal number
        for data in sender.sync.outgoing(now, limit=50):
            for router_id, router in routers.items():
                if router is sender and dice.random() < 0.9:
                    # It hears itself, as on a broker, and pays no attention: not worth the time.
                    continue
                for _ in range(2 if not is_calm and dice.random() < repeat else 1):
                    is_cut = max(sender.cut_until, router.cut_until) > now
                    if is_cut or (not is_calm and dice.random() < lose):
                        seen["lost"] += 1
                        continue
                    number += 1
                    at = now + (0.01 if is_calm else dice.uniform(0, late))
                    heapq.heappush(on_way, (at, number, router_id, data))
                    if not is_calm and dice.random() < forge:
                        seen["forged"] += 1
                        number += 1
                        forged = json.loads(data) | {"sequence": dice.choice([10**6, 2**64 - 1])}
                        told = (at, number, router_id, json.dumps(forged).encode())
                        heapq.heappush(on_way, told)

    def deliver() -> None:
        while on_way and on_way[0][0] <= now:
            _, _, router_id, data = heapq.heappop(on_way)
            if router_id in routers:
                routers[router_id].sync.received(data, now)

    def step(*, is_calm: bool, is_ending: bool) -> None:
        nonlocal now
        now += TICK_S
        deliver()
        for router in routers.values():
            if is_ending:
                router.act(dice, is_ending=True)
            elif not is_calm:
                for _ in range(dice.choice([0, 1, 1, 5])):
                    router.act(dice, is_ending=False)
            send(router, is_calm=is_calm)
        for router in routers.values():
            router.sync.listed(set(routers), now)

    for _ in range(150):
        if len(routers) < 2 or (len(routers) < 4 and dice.random() < 0.03):
            routers[next_id] = Router(next_id)
            next_id += 1
        elif dice.random() < 0.01:
            # Its messages may still be on their way.
            del routers[dice.choice(list(routers))]
            seen["deaths"] += 1
        if dice.random() < cut:
            dice.choice(list(routers.values())).cut_until = now + dice.uniform(1, 5)
        step(is_calm=False, is_ending=False)

    def agree() -> bool:
        """Everybody is in everybody's view, with the requests that it has."""
        own = {at: set(router.requests) for at, router in routers.items()}
        return all(
            {at: set(view) for at, view in active(router.sync).items()} == own
            for router in routers.values()
        )

    def settle(steps_max: int, *, is_ending: bool) -> None:
        """Go on until all agree, and then for as long as a digest takes to be told again."""
        for _ in range(steps_max):
            step(is_calm=True, is_ending=is_ending)
            if agree() and not (is_ending and any(r.requests for r in routers.values())):
                break
        for _ in range(DIGEST_STEPS):
            step(is_calm=True, is_ending=is_ending)

    settle(120, is_ending=False)
    for one in routers.values():
        for other in routers.values():
            wanted = active(one.sync)[one.sync.router_id]
            assert set(wanted) == set(one.requests)
            assert active(other.sync).get(one.sync.router_id, {}) == wanted, f"seed {seed}"
            if one is other:
                continue
            said = {name for router, name in other.load.requests if router == one.sync.router_id}
            assert said == set(wanted), f"seed {seed}: what counts is not what is known"
            prefilled = {
                name
                for (router, name), request in other.load.requests.items()
                if router == one.sync.router_id and request[2] == 0
            }
            assert prefilled >= {name for name, is_done in one.requests.items() if is_done}
        seen["digests"] += len({repr(sorted(r.sync.digests().items())) for r in routers.values()})
        seen["routers"] += 1
        seen.update(one.sync.counts)
    for router in routers.values():
        assert set(active(router.sync)) == set(routers), "the dead are still counted"
    settle(200, is_ending=True)
    for router in routers.values():
        assert router.load.requests == {}, f"seed {seed}: load does not return to zero"
    return seen


@pytest.mark.timeout(3_600)
def test_views_converge_and_load_returns_to_zero() -> None:
    seen: Counter[str] = Counter()
    for one in play_all(play, __file__):
        seen += one
    print(dict(seen))
    assert seen["digests"] == seen["routers"], "all digests are equal"
    if ONE_SEED is None:
        assert seen["sequence_resets"] > SEEDS / 4, "no forged number silenced a router"
        for kind in (
            "forged",
            "lost",
            "deaths",
            "gaps",
            "resyncs",
            "dropped_events",
            "dropped_routers",
        ):
            assert seen[kind] > SEEDS / 4, f"a world without {kind} proves nothing"
