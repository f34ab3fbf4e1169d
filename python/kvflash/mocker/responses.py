"""OpenAI's Responses: requests to chats, answers with their events, and stored responses."""

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from kvflash.mocker.answer import Answer, event, logprobs_of, usage_of
from kvflash.mocker.fields import ApiError, Body, inner, is_object, listed, refuse
from kvflash.mocker.plan import Choice, Delta, Plan, Step
from kvflash.mocker.protocol import (
    GenerationParams,
    content_of,
    function_call,
    response_format,
    shared,
)
from kvflash.mocker.tokenizer import Tokenizer, texts_of

# Maximum of stored responses; the oldest ones are dropped.
STORE_MAX = 1024


class ResponseStore:
    """Past responses and their conversations, by id."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Body, list[Body]]] = {}

    def keep(self, response: Body, messages: list[Body]) -> None:
        """Store a response and its conversation, including the answer."""
        self._kept[response["id"]] = (response, messages)
        while len(self._kept) > STORE_MAX:
            del self._kept[next(iter(self._kept))]

    def find(self, response_id: object, param: str = "response_id") -> tuple[Body, list[Body]]:
        """A response and its conversation; refuses unknown ones with 404."""
        if isinstance(response_id, str) and response_id in self._kept:
            return self._kept[response_id]
        message = f"Response with id '{response_id}' not found."
        raise ApiError(404, "NotFoundError", message, param)

    def delete(self, response_id: str) -> Body:
        """Delete a response and return the body that confirms it; 404 for unknown ones."""
        self.find(response_id)
        del self._kept[response_id]
        return {"id": response_id, "object": "response", "deleted": True}


def as_chat(body: Body, store: ResponseStore) -> Body:
    """Convert a request for a response to a chat; refuses wrong fields."""
    messages: list[Body] = []
    if instructions := body.get("instructions"):
        messages.append({"role": "system", "content": instructions})
    if (previous := body.get("previous_response_id")) is not None:
        _, earlier = store.find(previous, "previous_response_id")
        messages += [message for message in earlier if message["role"] != "system"]
    if isinstance(told := body.get("input"), str):
        messages.append({"role": "user", "content": told})
    else:
        wanted = "text or a non-empty list of objects"
        items = listed(body, "input", is_object, wanted)
        messages += _turns(items or refuse(f"input must be {wanted}", "input"))
    chat = {**shared(body), "messages": messages, "max_tokens": body.get("max_output_tokens")}
    chat["response_format"] = response_format(body.get("text"))
    if tools := listed(body, "tools", is_object, "a list of objects"):
        chat["tools"] = _tools(tools)
        # Without functions there is no choice: tools that servers run are not supported here.
        if chat["tools"]:
            chat["tool_choice"] = _tool_choice(body.get("tool_choice"))
    chat["parallel_tool_calls"] = body.get("parallel_tool_calls")
    include = body.get("include")
    if isinstance(include, list) and "message.output_text.logprobs" in include:
        chat |= {"logprobs": True, "top_logprobs": body.get("top_logprobs")}
    return chat


def _turns(items: Sequence[Body]) -> list[Body]:
    """The items as messages: consecutive items of the assistant become one message."""
    turns: list[Body] = []

    def said(name: str, value: Any) -> None:
        last = turns[-1] if turns and turns[-1]["role"] == "assistant" else None
        if last is None or last.get(name) is not None:
            turns.append({"role": "assistant", "content": None, name: value})
        else:
            last[name] = value

    for item in items:
        kind, role = item.get("type", "message"), item.get("role")
        if kind == "function_call":
            name, arguments = str(item.get("name")), str(item.get("arguments"))
            call = function_call(item.get("call_id"), name, arguments)
            if turns and turns[-1]["role"] == "assistant":
                turns[-1].setdefault("tool_calls", []).append(call)
            else:
                said("tool_calls", [call])
        elif kind == "function_call_output":
            result = "".join(texts_of(item.get("output")))
            turns.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": result})
        elif kind == "reasoning":
            said("reasoning", "".join(texts_of(item.get("content") or item.get("summary"))[:1]))
        elif kind == "message" and role == "assistant":
            said("content", "".join(texts_of(item.get("content"))[:1]))
        elif kind == "message":
            turns.append({"role": role, "content": content_of(texts_of(item.get("content")))})
    return turns


def _tools(told: Sequence[Body]) -> list[Body]:
    return [
        {"type": "function", "function": {key: tool[key] for key in tool if key != "type"}}
        for tool in told
        if tool.get("type") == "function"
    ]


def _tool_choice(told: Any) -> Any:
    if inner(told, "type") == "function":
        return {"type": "function", "function": {"name": told.get("name")}}
    return told


class ResponseAnswer(Answer):
    """Builds a response, or the events of its stream.

    ``keep`` is called with the complete response before its end is sent, as the next turn may come
    at once.
    """

    def __init__(
        self,
        body: Body,
        keep: Callable[[Body, Plan], None],
        params: GenerationParams,
        tokenizer: Tokenizer,
    ) -> None:
        self._logprobs = logprobs_of(params, tokenizer)
        self._keep = keep
        self._sequence_number = 0
        # The items so far; the last one is open.
        self._items: list[Body] = []
        self._head: Body = {
            "id": str(body.get("request_id") or f"resp_{uuid.uuid4().hex}"),
            "object": "response",
            "created_at": int(time.time()),
            "model": params.model,
            "error": None,
            "incomplete_details": None,
            "instructions": body.get("instructions"),
            "metadata": body.get("metadata"),
            "max_output_tokens": params.max_tokens,
            "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
            "previous_response_id": body.get("previous_response_id"),
            "temperature": 1.0,
            "text": body.get("text") or {"format": {"type": "text"}},
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "top_p": 1.0,
        }

    def whole(self, choices: Sequence[Choice]) -> Body:
        (choice,) = choices
        self.piece(choice, choice.plan.whole)
        return self._completed(choice)[1]

    def opening(self, choices: Sequence[Choice]) -> bytes:
        begun = {**self._head, "status": "in_progress", "output": [], "usage": None}
        created = self._event("response.created", response=begun)
        return created + self._event("response.in_progress", response=begun)

    def piece(self, choice: Choice, step: Step) -> bytes:
        return b"".join(self._take(choice.plan, delta, step) for delta in step.deltas)

    def closing(self, choices: Sequence[Choice]) -> bytes:
        (choice,) = choices
        events, whole = self._completed(choice)
        return events + self._event("response.completed", response=whole)

    def failure(self, error: ApiError) -> bytes:
        told = error.body["error"]
        fields = {"code": told["type"], "message": told["message"], "param": None, "error": told}
        return self._event("error", **fields)

    def _completed(self, choice: Choice) -> tuple[bytes, Body]:
        """Finish the last item; returns the events of that, and the response."""
        events = b"" if self._items else self._take(choice.plan, Delta("", None, True))
        events += self._finish()
        used = usage_of([choice])
        is_cut = choice.plan.finish_reason == "length"
        whole = {
            **self._head,
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._items,
            "usage": {
                "input_tokens": used["prompt_tokens"],
                "input_tokens_details": {
                    "cached_tokens": used["prompt_tokens_details"]["cached_tokens"],
                    "cache_write_tokens": 0,
                },
                "output_tokens": used["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": used["total_tokens"],
            },
        }
        self._keep(whole, choice.plan)
        return events, whole

    def _take(self, plan: Plan, delta: Delta, step: Step | None = None) -> bytes:
        """Add to the open item or start a new one; returns the stream's events."""
        events = b""
        if delta.is_first:
            events = self._finish() + self._begin(plan, delta)
        item = self._items[-1]
        if delta.call is not None:
            item["arguments"] += delta.text
            name, fields = "response.function_call_arguments.delta", {"item_id": item["id"]}
        else:
            item["content"][0]["text"] += delta.text
            name, fields = "response.output_text.delta", {**self._place(), "logprobs": []}
            if self._logprobs is not None and step is not None:
                fields["logprobs"] = self._logprobs.chat(step.token_ids, step.pieces)
                item["content"][0]["logprobs"] += fields["logprobs"]
        return events + (self._event(name, **fields, delta=delta.text) if delta.text else b"")

    def _begin(self, plan: Plan, delta: Delta) -> bytes:
        if delta.call is not None:
            call = plan.calls[delta.call]
            head = {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call"}
            told = {"call_id": call.call_id, "name": call.name, "arguments": ""}
            self._items.append({**head, **told, "status": "in_progress"})
            return self._event("response.output_item.added", item=self._items[-1])
        head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant"}
        self._items.append({**head, "status": "in_progress", "content": []})
        added = self._event("response.output_item.added", item=self._items[-1])
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._items[-1]["content"].append(part)
        return added + self._event("response.content_part.added", **self._place(), part=part)

    def _finish(self) -> bytes:
        if not self._items:
            return b""
        item = self._items[-1]
        item["status"] = "completed"
        if item["type"] == "function_call":
            told = {"item_id": item["id"], "name": item["name"], "arguments": item["arguments"]}
            done = self._event("response.function_call_arguments.done", **told)
        else:
            (part,) = item["content"]
            told = {"text": part["text"], "logprobs": part["logprobs"]}
            done = self._event("response.output_text.done", **self._place(), **told)
            done += self._event("response.content_part.done", **self._place(), part=part)
        return done + self._event("response.output_item.done", item=item)

    def _place(self) -> Body:
        return {"item_id": self._items[-1]["id"], "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        number = self._sequence_number
        self._sequence_number += 1
        is_whole = "response" in fields or kind == "error"
        place = {} if is_whole else {"output_index": len(self._items) - 1}
        return event({"type": kind, "sequence_number": number, **place, **fields}, kind)
