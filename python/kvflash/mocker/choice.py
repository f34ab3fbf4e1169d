"""One answer to a prompt, and the steps in which it reaches the client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvflash.mocker.plan import Delta, Plan
from kvflash.mocker.request import Request


class Step(NamedTuple):
    """The part of an answer that one step of the engine adds.

    Attributes:
        deltas: The visible part of it.
        start: Tokens of the answer before the step.
        end: Tokens of the answer after the step.
        chars: Characters generated before the step.
        is_last: Whether the answer is complete.
    """

    deltas: Sequence[Delta]
    start: int
    end: int
    chars: int
    is_last: bool


class Choice:
    """One answer to a prompt while it is sent to the client.

    Attributes:
        index: Its number among the answers to the prompt.
        plan: Its planned content.
        request: Its request in the engine.
        is_told: Whether all of it has been returned.
    """

    def __init__(self, index: int, plan: Plan, request: Request) -> None:
        """Start before the first token."""
        self.index = index
        self.plan = plan
        self.request = request
        self.is_told = False
        self._tokens = 0
        self._chars = 0

    def step(self, count: int) -> Step:
        """Return the next tokens."""
        start, end, chars = self._tokens, self._tokens + count, self._chars
        self._tokens = end
        self._chars += sum(map(len, self.plan.pieces[start:end]))
        self.is_told = end == len(self.plan.token_ids)
        return Step(self.plan.deltas(chars, self._chars), start, end, chars, self.is_told)
