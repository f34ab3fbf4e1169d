"""Announces a publisher's events, from any thread, through a runtime that has one event loop."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any
from weakref import WeakKeyDictionary

from kvflash.errors import (
    ClosedError,
    ConflictError,
    InvalidArgumentError,
    KvflashError,
    TransportError,
)
from kvflash.runtime import Component, DistributedRuntime

logger = logging.getLogger(__name__)

# How long a thread waits for discovery. The event loop's own thread never waits.
_WAIT_S_MAX = 5.0

# The keys of living publishers: a second one of the same rank would hide the first.
_held: WeakKeyDictionary[DistributedRuntime, set[str]] = WeakKeyDictionary()


def events_key(component: Component, instance_id: int, dp_rank: int) -> str:
    """The key under which a rank's events are announced."""
    return f"v1/events/{component.namespace.name}/{component.name}/{instance_id}/{dp_rank}"


def events_value(
    kind: str, endpoint: str, replay_endpoint: str | None, block_size: int
) -> dict[str, Any]:
    """What is announced there; ``kind`` is zmq, nats or jetstream."""
    return {
        "kind": kind,
        "endpoint": endpoint,
        "replay_endpoint": replay_endpoint,
        "block_size": block_size,
    }


def announce_events(
    component: Component,
    dp_rank: int,
    where: dict[str, Any],
    *,
    worker_id: int,
    loop: asyncio.AbstractEventLoop | None,
) -> Callable[[], None]:
    """Announce an endpoint for as long as the runtime lives; returns what withdraws it.

    In the thread of the runtime's loop this returns at once and logs a failure; in any other thread
    it waits, and raises a TransportError if discovery can't be reached. Without a loop, it uses the
    one that runs in this thread, or raises InvalidArgumentError; a ConflictError says that another
    publisher of this process announces the same rank. The result may be called in any thread; a
    worker_id of 0 means the runtime's own instance.
    """
    runtime = component.runtime
    home = loop or _running()
    if home is None:
        raise InvalidArgumentError(
            "loop must be the runtime's event loop when a publisher with a component is created "
            "outside of it"
        )
    key = events_key(component, worker_id or runtime.instance_id, dp_rank)
    held = _held.setdefault(runtime, set())
    if key in held:
        raise ConflictError(
            f"another publisher announces the events of rank {dp_rank} of {component.name!r} here: "
            "shut it down first, or publish for another dp_rank"
        )
    held.add(key)
    announced = asyncio.run_coroutine_threadsafe(runtime.announce(key, where), home)
    try:
        _settle(announced, home)
    except BaseException:
        announced.cancel()
        if home.is_running():
            # It may have been announced at the last moment.
            asyncio.run_coroutine_threadsafe(runtime.withdraw(key), home)
        held.discard(key)
        raise

    async def take_back() -> None:
        with contextlib.suppress(Exception):
            await asyncio.wrap_future(announced)
        # A runtime that has ended has withdrawn everything.
        with contextlib.suppress(ClosedError):
            await runtime.withdraw(key)

    def withdraw() -> None:
        held.discard(key)
        if not home.is_running():
            # A runtime ends with its loop, and its keys with it.
            return
        try:
            _settle(asyncio.run_coroutine_threadsafe(take_back(), home), home)
        except KvflashError as error:
            logger.warning("can't withdraw the announcement of events: %s", error)

    return withdraw


def _settle(done: Future[None], home: asyncio.AbstractEventLoop) -> None:
    """Wait for it; in the thread of its loop, log a failure when it comes."""
    if _running() is home:
        done.add_done_callback(_log_failure)
        return
    if not wait([done], _WAIT_S_MAX).done:
        raise TransportError(f"discovery did not answer within {_WAIT_S_MAX:g} s")
    done.result()


def _log_failure(done: Future[None]) -> None:
    error = None if done.cancelled() else done.exception()
    if error is not None:
        logger.warning("can't announce events: %s", error)


def _running() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
