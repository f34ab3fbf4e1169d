"""Generates conversations of several applications from a seed.

Every application has its own long system prompt. Every conversation starts with its application's
prompt and then grows turn by turn: these are the two kinds of prefix that real traffic shares.
Pure: no clock, no sockets, randomness from the seed only.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Conversation", "Message", "Workload", "WorkloadOptions", "fingerprint", "generate"]

Message = dict[str, str]

_WORDS = [
    "account",
    "address",
    "agent",
    "answer",
    "archive",
    "balance",
    "batch",
    "branch",
    "budget",
    "cancel",
    "carrier",
    "catalog",
    "check",
    "claim",
    "client",
    "column",
    "confirm",
    "contract",
    "courier",
    "credit",
    "customer",
    "date",
    "deadline",
    "delay",
    "deliver",
    "deposit",
    "discount",
    "document",
    "draft",
    "error",
    "escalate",
    "estimate",
    "exchange",
    "export",
    "failure",
    "field",
    "filter",
    "folder",
    "format",
    "handle",
    "history",
    "import",
    "index",
    "invoice",
    "item",
    "label",
    "ledger",
    "limit",
    "list",
    "locate",
    "log",
    "manual",
    "margin",
    "market",
    "measure",
    "member",
    "merge",
    "message",
    "method",
    "missing",
    "monitor",
    "notice",
    "number",
    "offer",
    "open",
    "option",
    "order",
    "owner",
    "package",
    "partial",
    "payment",
    "pending",
    "permit",
    "plan",
    "policy",
    "price",
    "priority",
    "process",
    "product",
    "profile",
    "query",
    "quote",
    "range",
    "rate",
    "reason",
    "receipt",
    "record",
    "refund",
    "region",
    "reject",
    "release",
    "remind",
    "renew",
    "replace",
    "report",
    "request",
    "reserve",
    "result",
    "return",
    "review",
    "route",
    "rule",
    "sample",
    "schedule",
    "search",
    "section",
    "secure",
    "select",
    "service",
    "session",
    "ship",
    "status",
    "stock",
    "store",
    "summary",
    "support",
    "table",
    "target",
    "tax",
    "team",
    "term",
    "ticket",
    "total",
    "track",
    "transfer",
    "update",
    "user",
    "value",
    "verify",
    "version",
    "voucher",
    "warehouse",
    "warranty",
    "week",
    "worker",
    "write",
    "year",
    "zone",
]
_TRADES = [
    "billing",
    "travel",
    "library",
    "clinic",
    "logistics",
    "banking",
    "retail",
    "insurance",
    "energy",
    "telecom",
    "housing",
    "payroll",
    "catering",
    "training",
    "museum",
    "workshop",
]


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """Size and shape of a workload; lengths are ranges, both ends included.

    Attributes:
        applications: Number of different system prompts.
        conversations: Conversations of all applications together.
        turns: Requests in a conversation.
        system_chars: Length of a system prompt. Unit: characters, all ASCII.
        question_chars: Length of a user's message.
        answer_tokens: Requested tokens of an answer.
        think_ms: Time between an answer and the next question of its user.
        seed: Seed of all random choices.
    """

    applications: int
    conversations: int
    turns: int
    system_chars: tuple[int, int] = (5_000, 8_000)
    question_chars: tuple[int, int] = (150, 700)
    answer_tokens: tuple[int, int] = (12, 24)
    think_ms: tuple[int, int] = (200, 1_000)
    seed: int


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One request of a conversation, without the earlier turns.

    Attributes:
        question: The user's message.
        answer_tokens: Requested tokens.
        think_ms: Pause before it; 0 for the first turn.
    """

    question: str
    answer_tokens: int
    think_ms: int


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """The conversation of one user with one application.

    Attributes:
        number: Its position in the workload, from 0; conversations start in this order.
        application: Number of the application, from 0.
        system: The application's system prompt.
        turns: The requests in order.
    """

    number: int
    application: int
    system: str
    turns: tuple[Turn, ...]

    def messages(self, answers: Sequence[str]) -> list[Message]:
        """The messages of the turn that follows these answers.

        Args:
            answers: The engines' answers so far; fewer than turns.
        """
        messages: list[Message] = [{"role": "system", "content": self.system}]
        for turn, answer in zip(self.turns, answers, strict=False):
            messages.append({"role": "user", "content": turn.question})
            messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": self.turns[len(answers)].question})
        return messages


@dataclass(frozen=True, kw_only=True)
class Workload:
    """All conversations, in order of their starts."""

    options: WorkloadOptions
    conversations: tuple[Conversation, ...]

    @property
    def request_count(self) -> int:
        """Requests of all conversations."""
        return sum(len(one.turns) for one in self.conversations)

    @property
    def shared_chars(self) -> int:
        """Length of all different system prompts together."""
        return sum(map(len, {one.system for one in self.conversations}))


def generate(options: WorkloadOptions) -> Workload:
    """Generate the workload of a seed: equal options give equal characters."""
    rng = random.Random(options.seed)
    systems = [_system(rng, number, options) for number in range(options.applications)]
    # Every application gets its share; their order is shuffled.
    applications = [number % len(systems) for number in range(options.conversations)]
    rng.shuffle(applications)
    conversations = []
    for number, application in enumerate(applications):
        turns = tuple(
            Turn(
                question=_prose(rng, rng.randint(*options.question_chars)),
                answer_tokens=rng.randint(*options.answer_tokens),
                think_ms=rng.randint(*options.think_ms) if place else 0,
            )
            for place in range(options.turns)
        )
        conversations.append(
            Conversation(
                number=number, application=application, system=systems[application], turns=turns
            )
        )
    return Workload(options=options, conversations=tuple(conversations))


def fingerprint(value: Any) -> str:
    """A short name for a JSON value: equal values have equal names."""
    data = json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.sha256(data).hexdigest()[:16]


def _system(rng: random.Random, number: int, options: WorkloadOptions) -> str:
    trade = _TRADES[number % len(_TRADES)]
    # The number comes first, so that two applications share no block.
    opening = f"{number:03} You are the assistant of the {trade} desk. These are your rules. "
    length = max(rng.randint(*options.system_chars), len(opening) + 1)
    return opening + _prose(rng, length - len(opening))


def _prose(rng: random.Random, length: int) -> str:
    """Sentences of exactly `length` >= 1 ASCII characters."""
    pieces: list[str] = []
    # The last sentence has no trailing space.
    size = -1
    while size < length:
        words = " ".join(rng.choices(_WORDS, k=rng.randint(5, 12)))
        pieces.append(words.capitalize() + ".")
        size += len(words) + 2
    text = " ".join(pieces)[:length]
    # A chat template may trim white space at the ends.
    return text[:-1] + "." if text[-1] == " " else text
