"""Mock engines and a frontend in front of them, ready to serve."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import aiohttp

from demo.child import READY_TIMEOUT_S, Child, Children

__all__ = ["MODEL", "Fleet", "FleetOptions", "start_fleet"]

MODEL = "mock-model"

# Interval of checks of /health; the end of the process is noticed at once.
POLL_S = 0.02


@dataclass(frozen=True, kw_only=True)
class FleetOptions:
    """Settings shared by all fleets.

    Attributes:
        workers: Number of engines.
        block_size: Tokens in a block.
        cache_blocks: Blocks of one engine's cache.
        speedup_ratio: Modelled time / real time.
        seed: Seed of the frontend's choices between equals.
        flags: Further flags of the frontend.
    """

    workers: int
    block_size: int
    cache_blocks: int
    speedup_ratio: float
    seed: int
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fleet:
    """A running fleet.

    Attributes:
        url: The frontend.
        engines: Its engines' URLs.
        children: Its processes.
    """

    url: str
    engines: tuple[str, ...]
    children: tuple[Child, ...]


async def start_fleet(
    children: Children, session: aiohttp.ClientSession, mode: str, options: FleetOptions
) -> Fleet:
    """Start cold engines and a frontend; returns when the frontend knows every engine as healthy.

    Args:
        children: Stops them; logs are named by mode and seed.
        session: Client for the frontend's health.
        mode: The frontend's --router-mode.
        options: The fleet.

    Raises:
        ChildError: A process ended or was not ready in time.
    """
    engines = await children.start(
        f"{mode}-{options.seed}-mocker",
        "kvflash.mocker",
        *("--num-workers", str(options.workers), "--port", "0", "--model-name", MODEL),
        *("--zmq-events-port", "auto", "--zmq-replay-port", "auto"),
        *("--block-size", str(options.block_size), "--num-gpu-blocks", str(options.cache_blocks)),
        *("--speedup-ratio", str(options.speedup_ratio), "--drain-timeout", "1"),
    )
    workers = await engines.ready(options.workers)
    specs = [f"{w['url']},events={w['events']},replay={w['replay']}" for w in workers]
    frontend = await children.start(
        f"{mode}-{options.seed}-frontend",
        "kvflash.frontend",
        *("--router-mode", mode, "--host", "127.0.0.1", "--port", "0"),
        # The clients have their answers before the frontend ends.
        *("--lame-duck-timeout", "0", "--drain-timeout", "1"),
        *("--seed", str(options.seed), *options.flags),
        *(part for spec in specs for part in ("--worker", spec)),
    )
    (ready,) = await frontend.ready(1)
    url = str(ready["url"])
    await frontend.within(
        _healthy(session, url, frontend, options.workers),
        READY_TIMEOUT_S,
        f"{options.workers} healthy workers that it hears events of",
    )
    return Fleet(url, tuple(str(w["url"]) for w in workers), (frontend, engines))


async def _healthy(session: aiohttp.ClientSession, url: str, frontend: Child, workers: int) -> None:
    """Poll until all workers are healthy and the sockets of their events are connected."""
    while True:
        async with session.get(f"{url}/health") as response:
            is_healthy = (await response.json())["healthy_workers"] == workers
        if is_healthy:
            async with session.get(f"{url}/workers") as response:
                if all(_is_heard(entry) for entry in await response.json()):
                    return
        if await frontend.ended(POLL_S):
            # `within` has the better message.
            await asyncio.Event().wait()


def _is_heard(worker: dict[str, Any]) -> bool:
    listeners = worker["listeners"]
    return bool(listeners) and all(listener["status"] == "active" for listener in listeners)
