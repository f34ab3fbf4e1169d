"""One answer to a prompt on its way to the client, and the steps in which it goes there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvflash.mocker.plan import Delta, Plan
from kvflash.mocker.request import Request


class Step(NamedTuple):
    """What one step of the engine adds to an answer.

    Attributes:
        deltas: What a client is told of it.
        start: Tokens of the answer before it.
        end: Tokens of the answer with it.
        chars: Characters that were generated before it.
        is_last: Whether the answer is over.
    """

    deltas: Sequence[Delta]
    start: int
    end: int
    chars: int
    is_last: bool


class Choice:
    """One answer to a prompt on its way to the client.

    Attributes:
        index: Its number among the answers to the prompt.
        plan: What it will be.
        request: Its request in the engine.
        is_told: Whether all of it has been handed out.
    """

    def __init__(self, index: int, plan: Plan, request: Request) -> None:
        """Nothing of it is told."""
        self.index = index
        self.plan = plan
        self.request = request
        self.is_told = False
        self._tokens = 0
        self._chars = 0

    def step(self, count: int) -> Step:
        """Hand out the next tokens."""
        start, end, chars = self._tokens, self._tokens + count, self._chars
        self._tokens = end
        self._chars += sum(map(len, self.plan.pieces[start:end]))
        self.is_told = end == len(self.plan.token_ids)
        return Step(self.plan.deltas(chars, self._chars), start, end, chars, self.is_told)
