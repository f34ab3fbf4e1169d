"""The content of an answer, token by token, planned before the first one is generated.

It is words, a value of a schema, or tool calls. A client sees the text, and the arguments of calls;
the marks around them, and a text that ends the answer, are generated but hidden.
"""

import json
import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import accumulate
from typing import NamedTuple

from kvflash.errors import InvalidArgumentError
from kvflash.mocker.fields import refuse
from kvflash.mocker.options import CALLS_MAX, AnswerOptions
from kvflash.mocker.scheduler import Request
from kvflash.mocker.tokenizer import CALL_END, Tokenizer, call_text, pieces


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call; the arguments are JSON."""

    call_id: str
    name: str
    arguments: str


class Delta(NamedTuple):
    """A piece of an answer."""

    text: str  # More text, or more of a call's arguments.
    call: int | None  # Number of that call in the answer, or None for text.
    is_first: bool  # Whether the call or the text starts here.


class Span(NamedTuple):
    """Characters of the generated text that clients see: text, or the arguments of a call."""

    start: int
    end: int
    call: int | None = None


class Step(NamedTuple):
    """The part of an answer that one step of the engine adds."""

    deltas: Sequence[Delta]  # The visible part of it.
    token_ids: Sequence[int]
    pieces: Sequence[str]  # The text of each token.
    chars: int  # Characters generated before the step.
    is_last: bool  # Whether the answer is complete.


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plan of an answer."""

    token_ids: Sequence[int]
    pieces: Sequence[str]  # The text of each token.
    raw: str  # The whole text, with the marks around calls and the text that ended it.
    spans: Sequence[Span]  # The visible parts in order; the rest is hidden.
    calls: Sequence[ToolCall] = ()
    finish_reason: str  # stop, length or tool_calls, in OpenAI's terms.
    stop_reason: str | int | None = None  # The text or the token that ended it.

    def deltas(self, start: int, end: int) -> list[Delta]:
        """What a client sees once the characters from `start` to `end` are generated."""
        told = []
        for span in self.spans:
            low, high = max(span.start, start), min(span.end, end)
            if low < high:
                told.append(Delta(self.raw[low:high], span.call, low == span.start))
        return told

    @property
    def whole(self) -> Step:
        """All of it in one step."""
        return Step(self.deltas(0, len(self.raw)), self.token_ids, self.pieces, 0, True)

    @property
    def text(self) -> str:
        """The text of the answer, without calls."""
        return "".join(delta.text for delta in self.whole.deltas if delta.call is None)

    @property
    def told_calls(self) -> list[ToolCall]:
        """The calls generated so far: the arguments of the last one may be cut off."""
        return [
            replace(self.calls[delta.call], arguments=delta.text)
            for delta in self.whole.deltas
            if delta.call is not None
        ]


@dataclass(eq=False)
class Choice:
    """One answer to a prompt while it is sent to the client."""

    index: int
    plan: Plan
    request: Request
    _tokens: int = 0  # Returned so far.
    _chars: int = 0

    @property
    def has_news(self) -> bool:
        """Whether the engine has generated tokens since the last step."""
        return self._tokens < self.request.output_tokens

    @property
    def is_told(self) -> bool:
        """Whether all of it has been returned."""
        return self._tokens == len(self.plan.token_ids)

    def step(self) -> Step:
        """Return the tokens that are new."""
        plan, chars = self.plan, self._chars
        new = slice(self._tokens, self.request.output_tokens)
        self._tokens = new.stop
        self._chars += sum(map(len, plan.pieces[new]))
        deltas = plan.deltas(chars, self._chars)
        return Step(deltas, plan.token_ids[new], plan.pieces[new], chars, self.is_told)


def plan_answer(
    options: AnswerOptions, tokenizer: Tokenizer, *, seed: int, index: int, max_tokens: int
) -> Plan:
    """Plan answer ``index``, the same for equal seeds; refuses a schema without a value."""
    if options.seed is not None or index:
        mixed = blake2b(f"{seed} {options.seed} {index}".encode(), digest_size=8)
        seed = int.from_bytes(mixed.digest(), "big")
    spans: list[Span] = []
    calls: list[ToolCall] = []
    if options.tools or options.schema is not None:
        if options.tools:
            raw, spans, calls = _calls(options, random.Random(seed))
        else:
            raw = json.dumps(_instance(options.schema, random.Random(seed), "response_format"))
        token_ids = tokenizer.encode(raw, add_special_tokens=False)
        words = pieces(tokenizer, token_ids, raw)
        is_cut = len(token_ids) > max_tokens
    else:
        is_cut = options.text_tokens is None or options.text_tokens > max_tokens
        token_ids = tokenizer.plan_output(seed, min(max_tokens, options.text_tokens or max_tokens))
        words = list(map(tokenizer.piece, token_ids))
    reason = "length" if is_cut else "stop"
    if calls and not is_cut and not options.is_named:
        reason = "tool_calls"  # A call to a named tool ends with `stop`.
    words = words[:max_tokens]
    raw = "".join(words)
    plan = Plan(
        token_ids=token_ids[:max_tokens],
        pieces=words,
        raw=raw,
        spans=spans or [Span(0, len(raw))],
        calls=calls,
        finish_reason=reason,
    )
    return _stopped(plan, options) if options.stop or options.stop_token_ids else plan


def _calls(options: AnswerOptions, rng: random.Random) -> tuple[str, list[Span], list[ToolCall]]:
    tools = options.tools[:CALLS_MAX] if options.calls_each else [rng.choice(options.tools)]
    raw, spans, calls = "", [], []
    for number, tool in enumerate(tools):
        arguments = json.dumps(_instance(tool.parameters, rng, f"tools: {tool.name}"))
        raw += ("\n" if raw else "") + call_text(tool.name, arguments)
        end = len(raw) - len(CALL_END) - len("}")
        spans.append(Span(end - len(arguments), end, number))
        calls.append(ToolCall(f"call_{rng.getrandbits(96):024x}", tool.name, arguments))
    return raw, spans, calls


def _instance(schema: object, rng: random.Random, where: str) -> object:
    # Here, because few requests have a schema.
    from kvflash.mocker.schema import instance  # noqa: PLC0415

    try:
        return instance(schema, rng)
    except InvalidArgumentError as error:
        refuse(f"{where}: {error}", where.partition(":")[0])


def _stopped(plan: Plan, options: AnswerOptions) -> Plan:
    """The plan, cut at the first stop: a token, or a text that a token completes."""
    count, end = len(plan.token_ids), len(plan.raw)
    reason: str | int | None = None
    found = [
        (at + len(stop), at, stop) for stop in options.stop if (at := plan.raw.find(stop)) >= 0
    ]
    if found:
        complete, at, reason = min(found)
        # The tokens that cover these characters.
        count = bisect_left(list(accumulate(map(len, plan.pieces))), complete) + 1
        end = complete if options.has_stop else at
    for number, token_id in enumerate(plan.token_ids[:count]):
        if token_id in options.stop_token_ids:
            count, reason = number + 1, token_id
            end = sum(map(len, plan.pieces[: count if options.has_stop else number]))
            break
    if reason is None:
        return plan
    return replace(
        plan,
        token_ids=plan.token_ids[:count],
        pieces=plan.pieces[:count],
        raw="".join(plan.pieces[:count]),
        spans=[Span(one.start, min(one.end, end), one.call) for one in plan.spans],
        finish_reason="stop",
        stop_reason=reason,
    )
