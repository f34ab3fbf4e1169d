"""KvPushRouter where workers refuse, can't be reached, or leave and come back."""

from __future__ import annotations

import socket

import pytest
from test_kv_push_router import PATH, TOKENS, Stage, Worker, is_idle, known, run

from kvflash import DrainingError, NoWorkerError, TransportError


def drain(worker: Worker) -> None:
    """Have it refuse what comes while discovery still has it."""
    worker.runtime._serving.endpoints[PATH.replace(".", "/")].is_draining = True


def test_a_worker_that_drains_is_passed_over_for_the_others() -> None:
    async def work() -> None:
        async with Stage() as stage:
            leaving, other = [await stage.worker() for _ in range(2)]
            router = await stage.router(2)
            leaving.hold(TOKENS)
            await known(router, TOKENS, leaving, 4)
            drain(leaving)
            for suspects in (set(), {leaving.id}):
                # It holds the prompt, and is asked first: once.
                assert router._client.suspects() == suspects
                stream = await router.generate(TOKENS)
                assert len([item async for item in stream]) == 4
                assert stream.worker_id == other.id
            assert router._client.suspects() == {leaving.id}
            with pytest.raises(DrainingError, match="is draining"):
                _ = [item async for item in await router.generate(TOKENS, worker_id=leaving.id)]
            with pytest.raises(DrainingError):
                only = await router.generate(TOKENS, allowed_worker_ids=[leaving.id])
                _ = [item async for item in only]
            assert is_idle(router)

    run(work())


def test_what_went_wrong_is_raised_when_nobody_else_is_allowed() -> None:
    async def work() -> None:
        async with Stage() as stage:
            await stage.worker()
            # Nobody listens there while the socket is bound.
            with socket.socket() as silent:
                silent.bind(("127.0.0.1", 0))
                address = f"127.0.0.1:{silent.getsockname()[1]}"
                instance = {"instance_id": 7, "transport": {"kind": "tcp", "address": address}}
                key = f"v1/instances/{PATH.replace('.', '/')}/7"
                await stage.runtime().announce(key, instance)
                router = await stage.router(2, use_kv_events=False)
                with pytest.raises(TransportError, match="instance 7"):
                    await router.generate(TOKENS, allowed_worker_ids=[7])
                with pytest.raises(NoWorkerError):
                    await router.generate(TOKENS, allowed_worker_ids=[8])
                assert is_idle(router)

    run(work())
