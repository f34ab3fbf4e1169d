"""OpenAI's Responses: requests to chats, answers and their events, and those that are kept."""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from typing import Any

from kvflash.mocker.answer import event
from kvflash.mocker.protocol import shared, usage
from kvflash.mocker.refusal import ApiError, Body, refuse
from kvflash.mocker.request import Request

# Responses that are kept; the oldest ones go.
STORE_MAX = 1024


class ResponseStore:
    """The conversations behind past responses, by the id of each."""

    def __init__(self) -> None:
        """Start empty."""
        self._chats: OrderedDict[str, list[Body]] = OrderedDict()

    def keep(self, response_id: str, messages: list[Body]) -> None:
        """Keep a conversation, its answer included."""
        self._chats[response_id] = messages
        while len(self._chats) > STORE_MAX:
            self._chats.popitem(last=False)

    def find(self, response_id: object) -> list[Body]:
        """The conversation that ends with this response.

        Raises:
            ApiError: 404, it is not kept here.
        """
        if isinstance(response_id, str) and response_id in self._chats:
            return self._chats[response_id]
        message = f"Response with id '{response_id}' not found."
        raise ApiError(404, "NotFoundError", message, "previous_response_id")


def as_chat(body: Body, store: ResponseStore) -> Body:
    """The chat that a request for a response is: its text, without tools.

    Raises:
        ApiError: A field is wrong, or the previous response is not kept here.
    """
    messages: list[Body] = []
    if instructions := body.get("instructions"):
        messages.append({"role": "system", "content": instructions})
    if (previous := body.get("previous_response_id")) is not None:
        earlier = store.find(previous)
        messages += [message for message in earlier if message["role"] != "system"]
    told = body.get("input")
    if isinstance(told, str):
        messages.append({"role": "user", "content": told})
    elif isinstance(told, list) and told:
        messages += [_message(item) for item in told]
    else:
        refuse("input must be text or a non-empty list of items", "input")
    return {**shared(body), "messages": messages, "max_tokens": body.get("max_output_tokens")}


def _message(item: Any) -> Body:
    if not isinstance(item, dict):
        refuse("input must be a list of objects", "input")
    if item.get("type") == "function_call_output":
        return {"role": "tool", "content": str(item.get("output"))}
    content = item.get("content")
    if isinstance(content, list):
        parts = [part.get("text", "") for part in content if isinstance(part, dict)]
        content = "".join(map(str, parts))
    return {"role": item.get("role"), "content": content if isinstance(content, str) else ""}


class ResponseAnswer:
    """Builds a response, or the events of its stream."""

    def __init__(self, body: Body, model: str, max_tokens: int) -> None:
        """Start an answer to a request's body."""
        self.id = str(body.get("request_id") or f"resp_{uuid.uuid4().hex}")
        self._item_id = f"msg_{uuid.uuid4().hex}"
        self._sequence_number = 0
        self._head: Body = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "error": None,
            "incomplete_details": None,
            "instructions": body.get("instructions"),
            "metadata": body.get("metadata"),
            "max_output_tokens": max_tokens,
            "parallel_tool_calls": True,
            "previous_response_id": body.get("previous_response_id"),
            "temperature": 1.0,
            "tool_choice": "none",
            "tools": [],
            "top_p": 1.0,
        }

    def whole(self, text: str, request: Request, token_ids: list[int]) -> Body:
        """The response."""
        del token_ids
        used = usage(request)
        return {
            **self._head,
            # It always ends at the limit of tokens.
            "status": "incomplete",
            "incomplete_details": {"reason": "max_output_tokens"},
            "output": [self._item("completed", [_part(text)])],
            "usage": {
                "input_tokens": used["prompt_tokens"],
                "input_tokens_details": {
                    "cached_tokens": request.cached_tokens or 0,
                    "cache_write_tokens": 0,
                },
                "output_tokens": used["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": used["total_tokens"],
            },
        }

    def opening(self) -> bytes:
        """The response in progress, its item and the item's only part."""
        begun = {**self._head, "status": "in_progress", "output": [], "usage": None}
        return (
            self._event("response.created", response=begun)
            + self._event("response.in_progress", response=begun)
            + self._event("response.output_item.added", item=self._item("in_progress", []))
            + self._event("response.content_part.added", **self._place(), part=_part(""))
        )

    def piece(self, text: str, token_ids: list[int], *, is_last: bool) -> bytes:
        """More of the part."""
        del token_ids, is_last
        fields = {**self._place(), "delta": text, "logprobs": []}
        return self._event("response.output_text.delta", **fields)

    def closing(self, text: str, request: Request) -> bytes:
        """The end of part, item and response."""
        whole = self.whole(text, request, [])
        return (
            self._event("response.output_text.done", **self._place(), text=text, logprobs=[])
            + self._event("response.content_part.done", **self._place(), part=_part(text))
            + self._event("response.output_item.done", item=whole["output"][0])
            + self._event("response.completed", response=whole)
        )

    def failure(self, error: ApiError) -> bytes:
        """The error as an event."""
        told = error.body["error"]
        fields = {"code": told["type"], "message": told["message"], "param": None, "error": told}
        return self._event("error", **fields)

    def _place(self) -> Body:
        return {"item_id": self._item_id, "content_index": 0}

    def _item(self, status: str, content: list[Body]) -> Body:
        head = {"id": self._item_id, "type": "message", "role": "assistant"}
        return {**head, "status": status, "content": content}

    def _event(self, name: str, **fields: Any) -> bytes:
        number = self._sequence_number
        self._sequence_number += 1
        place = {} if "response" in fields or name == "error" else {"output_index": 0}
        return event({"type": name, "sequence_number": number, **place, **fields}, name)


def _part(text: str) -> Body:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
