"""The answer to one request in the form of its API: as a whole, or event by event."""

from __future__ import annotations

import json
from typing import Protocol

from kvflash.mocker.protocol import CompletionAnswer, usage
from kvflash.mocker.refusal import ApiError, Body
from kvflash.mocker.request import Request

DONE = b"data: [DONE]\n\n"


class Answer(Protocol):
    """Builds an answer; the bytes are events of a stream."""

    def whole(self, text: str, request: Request, token_ids: list[int]) -> Body:
        """The body of an answer that is not streamed."""

    def opening(self) -> bytes:
        """Events before the first text."""

    def piece(self, text: str, token_ids: list[int], *, is_last: bool) -> bytes:
        """Events of a piece of text."""

    def closing(self, text: str, request: Request) -> bytes:
        """Events after the last text, which was `text` in all."""

    def failure(self, error: ApiError) -> bytes:
        """Events that end a stream whose engine has failed."""


def event(body: Body, name: str | None = None) -> bytes:
    """A body as an event of a stream."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


class OpenAiAnswer:
    """A chat or a completion."""

    def __init__(
        self, answer: CompletionAnswer, *, has_usage_chunk: bool, has_token_ids: bool
    ) -> None:
        """Take the builder of its bodies, and what was asked to be told."""
        self._answer = answer
        self._has_usage_chunk = has_usage_chunk
        self._has_token_ids = has_token_ids

    def whole(self, text: str, request: Request, token_ids: list[int]) -> Body:
        """The body of an answer that is not streamed."""
        return self._answer.whole(text, request, token_ids if self._has_token_ids else None)

    def opening(self) -> bytes:
        """The role, for a chat."""
        chunk = self._answer.opening_chunk()
        return b"" if chunk is None else event(chunk)

    def piece(self, text: str, token_ids: list[int], *, is_last: bool) -> bytes:
        """A chunk of text."""
        told = token_ids if self._has_token_ids else None
        return event(self._answer.text_chunk(text, is_last=is_last, token_ids=told))

    def closing(self, text: str, request: Request) -> bytes:
        """The usage, if it was asked for, and the end."""
        del text
        used = event(self._answer.usage_chunk(request)) if self._has_usage_chunk else b""
        return used + DONE

    def failure(self, error: ApiError) -> bytes:
        """The error's body and the end."""
        return event(error.body) + DONE


class TokensAnswer:
    """vLLM's `/inference/v1/generate`: token ids."""

    def __init__(self, answer_id: str, model: str) -> None:
        """Start an answer."""
        self._head = {"request_id": answer_id, "output_mode": "tokens"}
        self._model = model

    def whole(self, text: str, request: Request, token_ids: list[int]) -> Body:
        """The body of an answer that is not streamed."""
        del text
        choice = {"index": 0, "token_ids": token_ids, "finish_reason": "length"}
        return {**self._head, "model": self._model, "choices": [choice], "usage": usage(request)}

    def opening(self) -> bytes:
        """Nothing."""
        return b""

    def piece(self, text: str, token_ids: list[int], *, is_last: bool) -> bytes:
        """A chunk of tokens."""
        del text
        reason = "length" if is_last else None
        choice = {"index": 0, "token_ids": token_ids, "finish_reason": reason}
        return event({**self._head, "choices": [choice]})

    def closing(self, text: str, request: Request) -> bytes:
        """The usage and the end."""
        del text
        return event({**self._head, "choices": [], "usage": usage(request)}) + DONE

    def failure(self, error: ApiError) -> bytes:
        """The error's body and the end."""
        return event(error.body) + DONE


class GenerateAnswer:
    """SGLang's `/generate`: every event has the whole text so far."""

    def __init__(self, answer_id: str, prompt_tokens: int) -> None:
        """Start an answer to a prompt of so many tokens."""
        self._id = answer_id
        self._prompt_tokens = prompt_tokens
        self._text = ""
        self._token_ids: list[int] = []

    def whole(self, text: str, request: Request, token_ids: list[int]) -> Body:
        """The body of an answer that is not streamed."""
        return self._body(text, token_ids, request.cached_tokens or 0, is_last=True)

    def opening(self) -> bytes:
        """Nothing."""
        return b""

    def piece(self, text: str, token_ids: list[int], *, is_last: bool) -> bytes:
        """The text so far; the last one comes with what was cached, when the answer is over."""
        self._text += text
        self._token_ids += token_ids
        if is_last:
            return b""
        return event(self._body(self._text, self._token_ids, None, is_last=False))

    def closing(self, text: str, request: Request) -> bytes:
        """The last event and the end."""
        return event(self.whole(text, request, self._token_ids)) + DONE

    def failure(self, error: ApiError) -> bytes:
        """The error's body and the end."""
        return event(error.body) + DONE

    def _body(
        self, text: str, token_ids: list[int], cached_tokens: int | None, *, is_last: bool
    ) -> Body:
        meta: Body = {
            "id": self._id,
            "finish_reason": {"type": "length", "length": len(token_ids)} if is_last else None,
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": len(token_ids),
        }
        if cached_tokens is not None:
            meta["cached_tokens"] = cached_tokens
        return {"text": text, "output_ids": token_ids, "meta_info": meta}
