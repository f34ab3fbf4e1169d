"""Two KvPushRouters of one component count each other's requests."""

from __future__ import annotations

from support_push_router import TOKENS, Stage, eventually, is_idle, run


def test_routers_with_replica_sync_decide_on_each_others_load() -> None:
    async def work() -> None:
        async with Stage() as stage:
            for _ in range(2):
                await stage.worker()
            one = await stage.router(2, router_replica_sync=True)
            two = await stage.router(2, router_replica_sync=True)
            first, _, _ = await one.best_worker(TOKENS, request_id="a")

            async def is_known() -> bool:
                return two.totals()["requests"] == 1

            await eventually(is_known, "the other's request")
            assert (two.totals()["prefill_tokens"], two.totals()["blocks"]) == (16, 4)
            other = [900 + at for at in range(16)]
            assert (await two.best_worker(other))[0] != first
            await one.mark_prefill_complete("a")

            async def is_prefilled() -> bool:
                return two.totals()["prefill_tokens"] == 0

            await eventually(is_prefilled, "the first token")
            await one.aclose()

            async def is_gone() -> bool:
                return is_idle(two)

            await eventually(is_gone, "the load of the router that left")

    run(work())
