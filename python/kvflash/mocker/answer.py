"""The answer to a request in the form of its API: as a whole, or event by event.

Log probabilities are derived from the tokens.
"""

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from aiohttp import web

from kvflash.mocker.fields import ApiError, Body
from kvflash.mocker.plan import Choice, Step
from kvflash.mocker.protocol import GenerationParams
from kvflash.mocker.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
# The generated token is always the likeliest; others follow at this distance.
LOGPROB_STEP = 0.5


class Answer(ABC):
    """Builds an answer; the bytes are events of a stream, by default without names."""

    _head: Body  # What the events of a stream have in common.
    _has_usage = True  # Whether the usage is an event, too.

    @abstractmethod
    def whole(self, choices: Sequence[Choice]) -> Any:
        """The body of a non-streamed answer."""

    def opening(self, choices: Sequence[Choice]) -> bytes:
        """Events before the first step."""
        return b""

    @abstractmethod
    def piece(self, choice: Choice, step: Step) -> bytes:
        """Events of a step."""

    def closing(self, choices: Sequence[Choice]) -> bytes:
        """Events after the last step."""
        used = {**self._head, "choices": [], "usage": usage_of(choices)}
        return (event(used) if self._has_usage else b"") + DONE

    def respond(self, whole: Any) -> web.Response:
        """The response of a non-streamed answer."""
        return web.json_response(whole)

    def failure(self, error: ApiError) -> bytes:
        """Events that end a stream after an engine failure."""
        return event(error.body) + DONE


def event(body: Body, name: str | None = None) -> bytes:
    """A body as an event of a stream."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


def usage_of(choices: Sequence[Choice]) -> Body:
    """The usage of finished answers to one prompt."""
    requests = [choice.request for choice in choices]
    prompt_tokens = len(requests[0].prompt_ids)
    completion_tokens = sum(one.output_tokens for one in requests)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": requests[0].cached_tokens or 0},
    }


class TokensAnswer(Answer):
    """vLLM's `/inference/v1/generate`: token ids."""

    def __init__(self, request_id: object, params: GenerationParams, _: Tokenizer) -> None:
        request_id = str(request_id or uuid.uuid4().hex)
        self._head = {"request_id": request_id, "output_mode": "tokens"}
        self._model = params.model

    def whole(self, choices: Sequence[Choice]) -> Body:
        told = [_tokens_choice(one, one.plan.whole) for one in choices]
        used = usage_of(choices)
        return {**self._head, "model": self._model, "choices": told, "usage": used}

    def piece(self, choice: Choice, step: Step) -> bytes:
        return event({**self._head, "choices": [_tokens_choice(choice, step)]})


def _tokens_choice(choice: Choice, step: Step) -> Body:
    plan = choice.plan
    reason = plan.finish_reason if step.is_last else None
    told = {"index": choice.index, "token_ids": step.token_ids, "finish_reason": reason}
    return told if plan.stop_reason is None else {**told, "stop_reason": plan.stop_reason}


class GenerateAnswer(Answer):
    """SGLang's `/generate`: every event contains the whole text so far."""

    def __init__(self, *_: object) -> None:
        self._id = uuid.uuid4().hex
        self._text = ""
        self._token_ids: list[int] = []

    def whole(self, choices: Sequence[Choice]) -> Body:
        (choice,) = choices
        plan = choice.plan
        body = self._body(choice, plan.text, plan.token_ids)
        reason: Body = {"type": "stop", "matched": plan.stop_reason}
        if plan.finish_reason == "length":
            reason = {"type": "length", "length": len(plan.token_ids)}
        cached_tokens = choice.request.cached_tokens or 0
        body["meta_info"] |= {"finish_reason": reason, "cached_tokens": cached_tokens}
        return body

    def piece(self, choice: Choice, step: Step) -> bytes:
        """The text so far; the last event is left to `closing`, with the cached tokens."""
        self._text += "".join(delta.text for delta in step.deltas)
        self._token_ids += step.token_ids
        return b"" if step.is_last else event(self._body(choice, self._text, self._token_ids))

    def closing(self, choices: Sequence[Choice]) -> bytes:
        return event(self.whole(choices)) + DONE

    def _body(self, choice: Choice, text: str, token_ids: Sequence[int]) -> Body:
        meta = {
            "id": self._id,
            "finish_reason": None,
            "prompt_tokens": len(choice.request.prompt_ids),
            "completion_tokens": len(token_ids),
        }
        return {"text": text, "output_ids": token_ids, "meta_info": meta}


class Logprobs:
    """The log probabilities of an answer's tokens, each with ``count`` likely ones."""

    def __init__(self, tokenizer: Tokenizer, count: int) -> None:
        self._tokenizer = tokenizer
        self._count = count

    def chat(self, token_ids: Sequence[int], pieces: Sequence[str]) -> list[Body]:
        """In the form of chats and responses: an entry for each token."""
        entries = []
        for token_id, piece in zip(token_ids, pieces, strict=True):
            likely = [_entry(text, chance) for text, chance in self._likely(token_id, piece)]
            entries.append({**_entry(piece, _chance(token_id)), "top_logprobs": likely})
        return entries

    def completion(
        self,
        token_ids: Sequence[int],
        pieces: Sequence[str],
        *,
        offset: int,
        is_prompt: bool = False,
    ) -> Body:
        """In the form of completions: lists, with offsets in the text from ``offset`` on."""
        chances: list[float | None] = [_chance(token_id) for token_id in token_ids]
        tops: list[dict[str, float] | None] | None = None
        if self._count:
            pairs = zip(token_ids, pieces, strict=True)
            tops = [dict(self._likely(token_id, piece)) for token_id, piece in pairs]
        if is_prompt and chances:
            chances[0] = None
            if tops:
                tops[0] = None
        *places, _ = accumulate(map(len, pieces), initial=offset)
        return {
            "tokens": list(pieces),
            "token_logprobs": chances,
            "top_logprobs": tops,
            "text_offset": places,
        }

    def _likely(self, token_id: int, piece: str) -> list[tuple[str, float]]:
        """The token itself, then alternatives."""
        if self._count == 0:
            return []
        others = self._tokenizer.plan_output(token_id, 4 * self._count)
        texts = dict.fromkeys([piece, *map(self._tokenizer.piece, others)])
        chance = _chance(token_id)
        return [(text, chance - LOGPROB_STEP * at) for at, text in enumerate(texts)][: self._count]


def _chance(token_id: int) -> float:
    return -(1 + token_id % 8) / 16


def _entry(text: str, chance: float) -> Body:
    return {"token": text, "logprob": chance, "bytes": list(text.encode(errors="replace"))}


def logprobs_of(params: GenerationParams, tokenizer: Tokenizer) -> Logprobs | None:
    """What a request wants of log probabilities, or None."""
    count = params.options.logprobs
    return None if count is None else Logprobs(tokenizer, count)
