"""Behaviour of two routers on one stream, as cases of other systems' test suites describe it.

dynamo/e2e-two-routers/001 and dynamo/e2e-indexer-sync/001 are run here;
dynamo/replica-sync-json and dynamo/local-indexer by rust and integration tests.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import nats
import nats.js.errors
from test_push_router_state import NATS, cluster, eventually, routing, run

from kvflash import KvPushRouter
from service import VECTORS, until
from support_cluster import BLOCK, Cluster, body, prompt
from support_frontend import COMPLETIONS, ask

__all__ = ["cluster"]

STREAM = "namespace-ns-component-backend-kv-events"
BUCKET = "namespace-ns-component-backend-radix-bucket"
CASES = {case["id"]: case for case in json.loads((VECTORS / "cluster_cases.json").read_text())}


def test_every_case_is_run() -> None:
    text = Path(__file__).read_text()
    assert len(CASES) == 2
    assert all(f'CASES["{name}"]' in text for name in CASES)


async def _asked(url: str, what: str) -> int:
    client = await nats.connect(url)
    try:
        jetstream = client.jetstream()
        if what == "consumers":
            return len(await jetstream.consumers_info(STREAM))
        return len(await (await jetstream.object_store(BUCKET)).list())
    except nats.js.errors.NotFoundError:
        return 0
    finally:
        await client.close()


def test_two_routers_leave_no_consumer_behind(cluster: Cluster) -> None:
    case = CASES["dynamo/e2e-two-routers/001"]
    given, wanted = case["input"], case["expected"]["durable_consumers"]
    url = cluster.env["NATS_SERVER"]

    def consumers() -> int:
        return asyncio.run(_asked(url, "consumers"))

    workers = cluster.workers(*NATS)
    routers = [cluster.frontend(workers, *NATS) for _ in range(given["routers"])]
    for number in range(given["requests"]):
        answer = ask(routers[number % len(routers)].url, COMPLETIONS, body(number % 20 + 1))
        assert answer.status == 200, answer.body
    assert consumers() == wanted[0] == 2
    for router, count in zip(routers, wanted[1:], strict=True):
        router.process.terminate()
        until(lambda count=count: consumers() == count, f"{count} consumers")


def test_two_indexers_come_to_hold_the_same(cluster: Cluster) -> None:
    case = CASES["dynamo/e2e-indexer-sync/001"]
    given, wanted = case["input"], case["expected"]
    url = cluster.env["NATS_SERVER"]
    cluster.workers(*NATS)

    async def send(router: KvPushRouter, first: int, count: int) -> None:
        for family in range(first, first + count):
            tokens = prompt(family)[: given["prompt_tokens"]]
            limits = {"max_tokens": given["max_tokens"], "ignore_eos": True}
            assert [item async for item in await router.generate(tokens, stop_conditions=limits)]

    async def work() -> None:
        threshold = given["snapshot_threshold"]
        async with routing(router_snapshot_threshold=threshold) as one:
            await send(one, 1, given["requests"])

            async def is_there() -> bool:
                return bool(await _asked(url, "objects"))

            await eventually(is_there, "the snapshot's object")
            assert wanted["snapshot_object_exists"]
            async with routing(router_snapshot_threshold=threshold) as two:
                await send(two, 100, wanted["second_router_requests"])
                blocks = 2 * given["requests"] * ((given["prompt_tokens"]) // BLOCK)

                async def are_equal() -> bool:
                    held = [_held(await router.dump_events()) for router in (one, two)]
                    return held[0] == held[1] and len(held[0]) >= blocks

                await eventually(are_equal, "equal dumps")
                assert two.stats()["ns.backend"]["restores_total"] == 1

    run(work())


def _held(dump: str) -> list[tuple[int, int, int]]:
    """Blocks as the case compares them: (worker_id, tokens_hash, parent_hash), no event ids."""
    found: list[tuple[int, int, int]] = []
    for event in json.loads(dump):
        stored: dict[str, Any] = event["event"]["data"]["stored"]
        parent = stored["parent_hash"] or 0
        for block in stored["blocks"]:
            found.append((event["worker_id"], block["tokens_hash"], parent))
            parent = block["block_hash"]
    return sorted(found)
