"""Your own routing policies: a class that chooses workers and runs in its own thread."""

import atexit
import inspect
import logging
import operator
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from kvflash._core import PolicyCandidate, PolicyDesk, PolicyEnded, PolicyQuestion, PolicyRequest
from kvflash.config import POLICY_PREFIX, policy_parts
from kvflash.errors import ConfigError

__all__ = ["Policy", "PolicyCandidate", "PolicyEnded", "PolicyRequest", "asked_of"]

logger = logging.getLogger(__name__)

#: See :data:`kvflash.config.POLICY_PREFIX`.
PREFIX = POLICY_PREFIX
#: Limits of a policy's ``deadline_s``; a request can't wait longer than a day for a choice.
DEADLINE_S_MIN, DEADLINE_S_MAX = 0.001, 86_400.0
LOG_INTERVAL_S = 60.0
CLOSE_S_MAX = 1.0

Choice = PolicyCandidate | int | Sequence[float | None]


class Policy(ABC):
    """Base class of routing policies: chooses a worker for each request.

    One thread makes all calls to an object, so it needs no locks. If a choice takes longer than
    ``deadline_s``, or fails, the ``kv`` policy chooses instead. Only :meth:`choose` is required;
    events are delivered only to the event methods that a subclass defines.

    Attributes:
        deadline_s: How long a request waits for :meth:`choose`, seconds; at least 0.001
            and at most 86,400.
    """

    deadline_s: float = 0.005

    @abstractmethod
    def choose(self, request: PolicyRequest, candidates: list[PolicyCandidate]) -> Choice:
        """Choose one of the workers that may take the request.

        Load and overlaps are a snapshot from the time of the call. A choice is discarded if its
        worker is gone or busy by the time of the answer.

        Args:
            request: The request.
            candidates: At least two, sorted by worker number.

        Returns:
            One of the candidates, or its index; or a score for each of them: the highest wins, ties
            by the lowest ``cost``; ``None`` excludes a candidate.
        """

    def routed(self, request: PolicyRequest, candidate: PolicyCandidate) -> None:  # noqa: B027
        """Called after a request was routed to a worker, even if another policy chose it."""

    def finished(self, ended: PolicyEnded) -> None:  # noqa: B027
        """Called after a request has ended, for whatever reason."""

    def removed(self, worker_id: int, dp_rank: int) -> None:  # noqa: B027
        """Called after a worker has left."""


def load(text: str) -> Policy:
    """Create the policy that ``python:module:Class`` names; a ConfigError says why it can't."""
    module, name = policy_parts(text)
    try:
        made = getattr(import_module(module), name)()
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        # Not a module that this one imports.
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            why += "; add the folder that contains it to PYTHONPATH"
        raise ConfigError(why) from error
    if not callable(getattr(made, "choose", None)):
        raise ConfigError(f"{name} has no method choose(request, candidates)")
    return made  # type: ignore[no-any-return]


class AskedPolicy:
    """A policy, and the thread that runs it, from the start to the end of the core that asks it.

    ``name`` stands in metrics, logs and decisions; default: the class's name. A ConfigError names
    a ``deadline_s`` outside its limits, and a ``choose`` that is a coroutine function.
    """

    def __init__(self, policy: Policy, name: str | None = None) -> None:
        if inspect.iscoroutinefunction(policy.choose):
            raise ConfigError(
                f"{type(policy).__name__}.choose must be a plain method, got an async one; write "
                "def choose(self, request, candidates)"
            )
        self._policy = policy
        self._logged_s = -LOG_INTERVAL_S
        #: The core's interface to it.
        self.desk = PolicyDesk(
            name or PREFIX + type(policy).__name__,
            deadline_s=_deadline_s(policy),
            **{event: _overrides(policy, event) for event in ("routed", "finished", "removed")},
        )
        self._thread = threading.Thread(target=self._run, name="kvflash-policy", daemon=True)

    def start(self) -> None:
        """Answer from now on. Call it once the core exists: without one the thread would stay."""
        self._thread.start()
        # If a thread woke up in the core while the interpreter ends, it would abort the process.
        atexit.register(self.close)

    def close(self) -> None:
        """Stop asking the policy, and wait up to a second for the call in progress."""
        atexit.unregister(self.close)
        self.desk.close()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
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
            except BaseException as error:
                # Also SystemExit: without this thread the policy would answer no more.
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
            wanted = f"one of {len(candidates)} candidates, its index, or a score for each, "
            wanted += "not all None"
            self._log(f"the policy's choose() must return {wanted}, got {choice!r:.200}")

    def _log(self, message: str, error: BaseException | None = None) -> None:
        """Log an error, at most once a minute; metrics count all."""
        now = time.monotonic()
        if now - self._logged_s >= LOG_INTERVAL_S:
            self._logged_s = now
            logger.warning("%s", message, exc_info=error)


def asked_of(mode: str | Policy | None, setting: str = "--router-mode") -> AskedPolicy | None:
    """The policy in Python that a routing mode selects, if any; it is not started yet.

    A ConfigError names the ``setting`` that has the mode, and says what is wrong with the policy.
    """
    if mode is None or (isinstance(mode, str) and not mode.startswith(PREFIX)):
        return None
    if not isinstance(mode, str):
        return AskedPolicy(mode)
    try:
        return AskedPolicy(load(mode), mode)
    except ConfigError as error:
        raise ConfigError(f"{setting} {mode}: {error}") from error.__cause__


def _deadline_s(policy: Policy) -> float:
    found = getattr(policy, "deadline_s", Policy.deadline_s)
    try:
        deadline_s = float(found)
    except (TypeError, ValueError, OverflowError):
        deadline_s = float("nan")
    # NaN is refused, too.
    if not DEADLINE_S_MIN <= deadline_s <= DEADLINE_S_MAX:
        raise ConfigError(
            f"{type(policy).__name__}.deadline_s must be a number of seconds, at least "
            f"{DEADLINE_S_MIN:g} and at most {DEADLINE_S_MAX:g}, got {found!r:.100}"
        )
    return deadline_s


def _overrides(policy: Policy, event: str) -> bool:
    found = getattr(type(policy), event, None)
    return found is not None and found is not getattr(Policy, event)


def _scores(choice: Any, candidates: list[PolicyCandidate]) -> list[float | None]:
    """Convert a choice to a score for each candidate; TypeError or ValueError if it is invalid."""
    if isinstance(choice, PolicyCandidate):
        choice = choice.index
    if choice is None or isinstance(choice, bool | str | bytes):
        raise TypeError("no choice")
    try:
        # Integers of NumPy count, too.
        chosen = operator.index(choice)
    except TypeError:
        scores = [None if score is None else float(score) for score in choice]
        if scores and all(score is None for score in scores):
            raise ValueError("every candidate is excluded") from None
        return scores
    if not 0 <= chosen < len(candidates):
        raise ValueError("no such candidate")
    return [1.0 if at == chosen else None for at in range(len(candidates))]
