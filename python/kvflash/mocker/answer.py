"""The answer to a request in the form of its API: as a whole, or event by event."""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from kvflash.mocker.fields import ApiError, Body
from kvflash.mocker.plan import Choice, Step

DONE = b"data: [DONE]\n\n"


class Answer(ABC):
    """Builds an answer; the bytes are events of a stream, by default without names."""

    @abstractmethod
    def whole(self, choices: Sequence[Choice]) -> Any:
        """The body of a non-streamed answer."""

    def opening(self, choices: Sequence[Choice]) -> bytes:
        """Events before the first step."""
        return b""

    @abstractmethod
    def piece(self, choice: Choice, step: Step) -> bytes:
        """Events of a step."""

    @abstractmethod
    def closing(self, choices: Sequence[Choice]) -> bytes:
        """Events after the last step."""

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

    def __init__(self, answer_id: str, model: str) -> None:
        self._head = {"request_id": answer_id, "output_mode": "tokens"}
        self._model = model

    def whole(self, choices: Sequence[Choice]) -> Body:
        told = [_tokens_choice(one, 0, len(one.plan.token_ids), is_last=True) for one in choices]
        used = usage_of(choices)
        return {**self._head, "model": self._model, "choices": told, "usage": used}

    def piece(self, choice: Choice, step: Step) -> bytes:
        told = _tokens_choice(choice, step.start, step.end, is_last=step.is_last)
        return event({**self._head, "choices": [told]})

    def closing(self, choices: Sequence[Choice]) -> bytes:
        return event({**self._head, "choices": [], "usage": usage_of(choices)}) + DONE


def _tokens_choice(choice: Choice, start: int, end: int, *, is_last: bool) -> Body:
    plan = choice.plan
    reason = plan.finish_reason if is_last else None
    told = {"index": choice.index, "token_ids": plan.token_ids[start:end], "finish_reason": reason}
    return told if plan.stop_reason is None else {**told, "stop_reason": plan.stop_reason}


class GenerateAnswer(Answer):
    """SGLang's `/generate`: every event contains the whole text so far."""

    def __init__(self, answer_id: str) -> None:
        self._id = answer_id
        self._text = ""

    def whole(self, choices: Sequence[Choice]) -> Body:
        (choice,) = choices
        return self._body(choice, choice.plan.text, len(choice.plan.token_ids), is_last=True)

    def piece(self, choice: Choice, step: Step) -> bytes:
        """The text so far; the last event is left to `closing`, with the cached tokens."""
        self._text += "".join(delta.text for delta in step.deltas)
        if step.is_last:
            return b""
        return event(self._body(choice, self._text, step.end, is_last=False))

    def closing(self, choices: Sequence[Choice]) -> bytes:
        return event(self.whole(choices)) + DONE

    def _body(self, choice: Choice, text: str, count: int, *, is_last: bool) -> Body:
        plan, request = choice.plan, choice.request
        meta: Body = {
            "id": self._id,
            "finish_reason": None,
            "prompt_tokens": len(request.prompt_ids),
            "completion_tokens": count,
        }
        if is_last and plan.finish_reason == "length":
            meta["finish_reason"] = {"type": "length", "length": count}
        elif is_last:
            meta["finish_reason"] = {"type": "stop", "matched": plan.stop_reason}
        if is_last:
            meta["cached_tokens"] = request.cached_tokens or 0
        return {"text": text, "output_ids": plan.token_ids[:count], "meta_info": meta}
