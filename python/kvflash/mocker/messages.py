"""Anthropic's Messages: requests to chats, answers to messages and their events."""

from __future__ import annotations

from typing import Any

from kvflash.mocker.answer import event
from kvflash.mocker.protocol import shared, usage
from kvflash.mocker.refusal import ApiError, Body, refuse
from kvflash.mocker.request import Request


def as_chat(body: Body, *, needs_max_tokens: bool = True) -> Body:
    """The chat that a request for a message is: its text, without tools.

    Raises:
        ApiError: A field is wrong.
    """
    if needs_max_tokens and body.get("max_tokens") is None:
        refuse("max_tokens is required", "max_tokens")
    messages: list[Body] = []
    if system := body.get("system"):
        messages.append({"role": "system", "content": _text(system, "system")})
    told = body.get("messages")
    if not isinstance(told, list):
        refuse("messages must be a list", "messages")
    for message in told:
        if not isinstance(message, dict):
            refuse("messages must be a list of objects", "messages")
        content = _text(message.get("content"), "messages.content")
        messages.append({"role": message.get("role"), "content": content})
    return {**shared(body), "messages": messages, "max_tokens": body.get("max_tokens")}


def error_body(error: ApiError) -> Body:
    """An error in Anthropic's form."""
    told = error.body["error"]
    kinds = {400: "invalid_request_error", 404: "not_found_error", 413: "request_too_large"}
    kinds |= {429: "rate_limit_error", 503: "overloaded_error"}
    kind = kinds.get(error.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": told["message"]}}


class MessageAnswer:
    """Builds a message, or the events of its stream."""

    def __init__(self, answer_id: str, model: str, prompt_tokens: int) -> None:
        """Start an answer to a prompt of so many tokens."""
        self._prompt_tokens = prompt_tokens
        self._head = {
            "id": "msg_" + answer_id,
            "type": "message",
            "role": "assistant",
            "model": model,
        }

    def whole(self, text: str, request: Request, token_ids: list[int]) -> Body:
        """The message."""
        del token_ids
        return {
            **self._head,
            "content": [{"type": "text", "text": text}],
            "stop_reason": "max_tokens",
            "stop_sequence": None,
            "usage": _usage(request),
        }

    def opening(self) -> bytes:
        """The empty message, and its only block."""
        used = {"input_tokens": self._prompt_tokens, "output_tokens": 0}
        empty: Body = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": used}
        block = {"type": "text", "text": ""}
        return _event("message_start", message={**self._head, **empty}) + _event(
            "content_block_start", index=0, content_block=block
        )

    def piece(self, text: str, token_ids: list[int], *, is_last: bool) -> bytes:
        """More of the block."""
        del token_ids, is_last
        return _event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})

    def closing(self, text: str, request: Request) -> bytes:
        """The end of the block and of the message."""
        del text
        delta = {"stop_reason": "max_tokens", "stop_sequence": None}
        return (
            _event("content_block_stop", index=0)
            + _event("message_delta", delta=delta, usage=_usage(request))
            + _event("message_stop")
        )

    def failure(self, error: ApiError) -> bytes:
        """The error as an event."""
        return event(error_body(error), "error")


def _event(name: str, **fields: Any) -> bytes:
    return event({"type": name, **fields}, name)


def _usage(request: Request) -> Body:
    used = usage(request)
    cached = request.cached_tokens or 0
    return {
        "input_tokens": used["prompt_tokens"] - cached,
        "output_tokens": used["completion_tokens"],
        "cache_read_input_tokens": cached,
    }


def _text(content: object, param: str) -> str:
    """The text of a content: a string, or blocks of text and results of tools."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        refuse(f"{param} must be text or a list of blocks", param)
    texts = []
    for block in content:
        if block.get("type") == "tool_result" and block.get("content"):
            texts.append(_text(block["content"], param))
        elif isinstance(block.get("text"), str):
            texts.append(block["text"])
    return "".join(texts)
