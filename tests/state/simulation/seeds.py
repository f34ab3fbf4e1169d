"""How many worlds are played, and on how many cores.

``KVFLASH_SIM_SEEDS=10000`` plays more seeds, ``KVFLASH_SIM_SEED=7`` plays one.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator
from typing import TypeVar

__all__ = ["ONE_SEED", "SEEDS", "play_all"]

T = TypeVar("T")

SEEDS = int(os.environ.get("KVFLASH_SIM_SEEDS", "80"))
ONE_SEED = int(os.environ["KVFLASH_SIM_SEED"]) if "KVFLASH_SIM_SEED" in os.environ else None
# Below it starting processes costs more than they save.
_ALONE_MAX = 500


def play_all(play: Callable[[int], T], file: str) -> Iterator[T]:
    """Play worlds, one per seed; returns their results.

    Args:
        play: Plays one world; raises if an invariant fails. A function of a module.
        file: The test's file, for the message on how to repeat a failure.

    Raises:
        AssertionError: Some seeds failed; each was printed with the command that repeats it.
    """
    if ONE_SEED is not None:
        yield play(ONE_SEED)
        return
    failed: list[int] = []
    for seed, (outcome, error) in enumerate(_outcomes(play)):
        if error is None:
            assert outcome is not None
            yield outcome
        else:
            failed.append(seed)
            print(f"{error}again: KVFLASH_SIM_SEED={seed} pytest {file} -s", flush=True)
    assert not failed, f"{len(failed)} of {SEEDS} seeds failed: {failed[:20]}"


class _Player:
    """Plays a seed; pickled with the function's name."""

    def __init__(self, play: Callable[[int], T]) -> None:
        self._play = play

    def __call__(self, seed: int) -> tuple[T | None, str | None]:
        try:
            return self._play(seed), None
        except Exception:
            return None, traceback.format_exc()


def _outcomes(play: Callable[[int], T]) -> Iterator[tuple[T | None, str | None]]:
    player = _Player(play)
    if SEEDS <= _ALONE_MAX:
        yield from map(player, range(SEEDS))
        return
    # The core's threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    with context.Pool(os.cpu_count(), logging.disable) as pool:
        yield from pool.imap(player, range(SEEDS), chunksize=50)
