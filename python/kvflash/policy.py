"""Policies of one's own: a class that chooses workers, asked in a thread of its own."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from kvflash._core import (
    PolicyCandidate,
    PolicyDesk,
    PolicyEnded,
    PolicyQuestion,
    PolicyRequest,
)
from kvflash.errors import ConfigError

__all__ = ["AskedPolicy", "Policy", "PolicyCandidate", "PolicyEnded", "PolicyRequest", "load"]

logger = logging.getLogger(__name__)

#: What a policy's name in ``--router-mode`` begins with.
PREFIX = "python:"
LOG_INTERVAL_S = 60.0
CLOSE_S_MAX = 1.0

Choice = PolicyCandidate | int | Sequence[float | None]


class Policy(ABC):
    """Chooses a worker for each request; subclasses say how.

    One thread calls all methods of one object, one after the other, so that it needs no locks. What
    it takes longer than ``deadline_s`` to choose, and what it fails to, the ``kv`` policy chooses.
    Only :meth:`choose` has to be there; events are told to those that define their methods.

    Attributes:
        deadline_s: How long a request waits for :meth:`choose`, seconds; at least 0.001.
    """

    deadline_s: float = 0.005

    @abstractmethod
    def choose(self, request: PolicyRequest, candidates: list[PolicyCandidate]) -> Choice:
        """Choose one of the workers that may take the request.

        Load and overlaps are those of the moment of the question. A worker that is gone or busy
        when the answer comes is not taken.

        Args:
            request: The request.
            candidates: At least two, in the order of their numbers.

        Returns:
            One of the candidates, or its index; or a score for each of them, of which the highest
            wins, then the lowest ``cost``; ``None`` for one that is not to be taken.
        """

    def routed(self, request: PolicyRequest, candidate: PolicyCandidate) -> None:  # noqa: B027
        """A request was given to a worker, whoever chose it."""

    def finished(self, ended: PolicyEnded) -> None:  # noqa: B027
        """A request has ended, however it did."""

    def removed(self, worker_id: int, dp_rank: int) -> None:  # noqa: B027
        """A worker has gone."""


def load(text: str) -> Policy:
    """Make the policy that ``python:module:Class`` names.

    Raises:
        ConfigError: There is no such module or class, or it can't be made without arguments.
    """
    module, _, name = text.removeprefix(PREFIX).rpartition(":")
    try:
        made = getattr(import_module(module), name)()
    except Exception as error:
        raise ConfigError(f"--router-mode {text}: {type(error).__name__}: {error}") from error
    if not callable(getattr(made, "choose", None)):
        raise ConfigError(f"--router-mode {text}: {name} has no method choose(request, candidates)")
    return made  # type: ignore[no-any-return]


class AskedPolicy:
    """A policy, and the thread in which it is asked.

    Args:
        policy: The policy.
        name: Its name in metrics, logs and decisions; its class's if not given.

    Raises:
        ConfigError: Its deadline is no time.
    """

    def __init__(self, policy: Policy, name: str | None = None) -> None:
        self._policy = policy
        self._logged_s = -LOG_INTERVAL_S
        #: Where it is asked: for the core.
        self.desk = PolicyDesk(
            name or PREFIX + type(policy).__name__,
            deadline_s=float(getattr(policy, "deadline_s", Policy.deadline_s)),
            **{event: _overrides(policy, event) for event in ("routed", "finished", "removed")},
        )
        self._thread = threading.Thread(target=self._run, name="kvflash-policy", daemon=True)
        self._thread.start()
        # A thread that wakes up in the core while the interpreter ends would end it badly.
        atexit.register(self.close)

    def close(self) -> None:
        """Ask it nothing more, and wait a second for what it is busy with."""
        atexit.unregister(self.close)
        self.desk.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_S_MAX)

    def _run(self) -> None:
        while (task := self.desk.next()) is not None:
            kind, first, second = task
            try:
                if kind == "choose":
                    self._answer(first)
                elif kind == "finished":
                    self._policy.finished(first)
                else:
                    getattr(self._policy, kind)(first, second)
            except Exception as error:
                self._log(f"the policy's {kind}() failed", error)

    def _answer(self, question: PolicyQuestion) -> None:
        candidates = question.candidates
        try:
            choice = self._policy.choose(question.request, list(candidates))
        except BaseException:
            question.fail()
            raise
        try:
            is_answered = question.answer(_scores(choice, candidates))
        except (TypeError, ValueError, OverflowError):
            question.fail(is_nonsense=True)
            is_answered = False
        if not is_answered:
            wanted = f"one of {len(candidates)} candidates, its index, or a score for each"
            self._log(f"the policy's choose() must return {wanted}, got {choice!r:.200}")

    def _log(self, message: str, error: Exception | None = None) -> None:
        """Say what went wrong, once a minute; metrics count the rest."""
        now = time.monotonic()
        if now - self._logged_s >= LOG_INTERVAL_S:
            self._logged_s = now
            logger.warning("%s", message, exc_info=error)


def _overrides(policy: Policy, event: str) -> bool:
    """Whether the policy wants to be told of an event."""
    found = getattr(type(policy), event, None)
    return found is not None and found is not getattr(Policy, event)


def _scores(choice: Any, candidates: list[PolicyCandidate]) -> list[float | None]:
    """A score for each candidate.

    Raises:
        TypeError, ValueError: It is no choice.
    """
    if isinstance(choice, PolicyCandidate):
        choice = choice.index
    if isinstance(choice, int) and not isinstance(choice, bool):
        if not 0 <= choice < len(candidates):
            raise ValueError("no such candidate")
        return [1.0 if at == choice else None for at in range(len(candidates))]
    if choice is None or isinstance(choice, str | bytes):
        raise TypeError("no choice")
    return [None if score is None else float(score) for score in choice]
