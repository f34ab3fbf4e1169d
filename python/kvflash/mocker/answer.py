"""The answer to a request in the form of its API: as a whole, or event by event."""

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from kvflash.mocker.fields import ApiError, Body
from kvflash.mocker.plan import Choice, Step
from kvflash.mocker.protocol import GenerationParams
from kvflash.mocker.tokenizer import Tokenizer

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

    def closing(self, choices: Sequence[Choice]) -> bytes:
        return event({**self._head, "choices": [], "usage": usage_of(choices)}) + DONE


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
