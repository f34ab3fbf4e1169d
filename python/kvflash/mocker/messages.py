"""Anthropic's Messages: requests to chats, and answers to messages with their events."""

import json
import uuid
from collections.abc import Sequence
from typing import Any

from kvflash.mocker.answer import Answer, event, usage_of
from kvflash.mocker.fields import ApiError, Body, inner, is_object, listed, refuse, shown
from kvflash.mocker.plan import Choice, Delta, Plan, Step, ToolCall
from kvflash.mocker.protocol import (
    GenerationParams,
    content_of,
    function_call,
    response_format,
    shared,
)
from kvflash.mocker.tokenizer import Tokenizer

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
# Claude Code starts its system prompt with a block that differs between requests.
BILLING = "x-anthropic-billing-header"
TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def as_chat(body: Body, *, needs_max_tokens: bool = True) -> Body:
    """Convert a message request to a chat; refuses wrong fields."""
    if needs_max_tokens and body.get("max_tokens") is None:
        refuse("max_tokens is required", "max_tokens")
    if body.get("messages") is None:
        refuse("messages is required", "messages")
    messages: list[Body] = []
    if system := body.get("system"):
        texts = _texts(system, "system")
        system = "".join(text for text in texts if not text.startswith(BILLING))
        messages.append({"role": "system", "content": system})
    for message in listed(body, "messages", is_object, "a list of objects"):
        messages += _turns(message)
    chat = {**shared(body), "messages": messages, "max_tokens": body.get("max_tokens")}
    chat |= {
        "stop": body.get("stop_sequences"),
        "response_format": response_format(body.get("output_config")),
    }
    if tools := listed(body, "tools", is_object, "a list of objects"):
        chat["tools"] = _tools(tools)
        if chat["tools"]:
            chat |= _tool_choice(body.get("tool_choice"))
    return chat


def error_body(error: ApiError) -> Body:
    """An error in Anthropic's form."""
    told = error.body["error"]
    kinds = {400: "invalid_request_error", 404: "not_found_error", 413: "request_too_large"}
    kinds |= {429: "rate_limit_error", 503: "overloaded_error"}
    kind = kinds.get(error.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": told["message"]}}


def _turns(message: Body) -> list[Body]:
    content, role = message.get("content"), message.get("role")
    said = content_of(_texts(content, "messages.content"))
    blocks = content if isinstance(content, list) else []
    turns: list[Body] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            result = "\n".join(_texts(block.get("content") or "", "messages.content"))
            called = block.get("tool_use_id")
            turns.append({"role": "tool", "tool_call_id": called, "content": result})
    calls = [
        function_call(block.get("id"), str(block.get("name")), json.dumps(block.get("input")))
        for block in blocks
        if block.get("type") == "tool_use"
    ]
    thoughts = [str(block.get("thinking")) for block in blocks if block.get("type") == "thinking"]
    if said or calls or thoughts or not turns:
        turn: Body = {"role": role, "content": said or (None if calls or thoughts else "")}
        if calls:
            turn["tool_calls"] = calls
        if thoughts:
            turn["reasoning"] = "".join(thoughts)
        turns.append(turn)
    return turns


def _texts(content: object, param: str) -> list[str]:
    """The texts of a content: a string, or blocks, of which those with text count."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        refuse(f"{param} must be text or a list of blocks", param)
    return [block["text"] for block in content if isinstance(block.get("text"), str)]


def _tools(told: Sequence[Body]) -> list[Body]:
    # Tools of another type run on a server, and have no schema.
    return [
        {
            "type": "function",
            "function": {
                "name": tool.get("name"),
                "description": tool.get("description"),
                "parameters": tool.get("input_schema"),
            },
        }
        for tool in told
        if tool.get("type") in (None, "custom")
    ]


def _tool_choice(told: Any) -> Body:
    if told is None:
        return {}
    kind = inner(told, "type")
    if kind not in (*TOOL_CHOICES, "tool"):
        wanted = "auto, any, tool or none"
        refuse(f"tool_choice.type must be {wanted}, got {shown(kind)}", "tool_choice")
    named = {"type": "function", "function": {"name": told.get("name")}}
    choice = named if kind == "tool" else TOOL_CHOICES[kind]
    is_parallel = told.get("disable_parallel_tool_use") is False
    return {"tool_choice": choice, "parallel_tool_calls": is_parallel}


class MessageAnswer(Answer):
    """Builds a message, or the events of its stream."""

    def __init__(self, params: GenerationParams, _: Tokenizer) -> None:
        self._prompt_tokens = len(params.prompt_ids)
        self._blocks = 0
        self._head = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": params.model,
        }

    def whole(self, choices: Sequence[Choice]) -> Body:
        (choice,) = choices
        plan = choice.plan
        blocks = [_tool_use(call, _input(call.arguments)) for call in plan.told_calls]
        if plan.text or not blocks:
            blocks.insert(0, {"type": "text", "text": plan.text})
        return {**self._head, "content": blocks, **_ending(plan), "usage": _usage(choice)}

    def opening(self, choices: Sequence[Choice]) -> bytes:
        used = {"input_tokens": self._prompt_tokens, "output_tokens": 0}
        empty: Body = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": used}
        return _event("message_start", message={**self._head, **empty})

    def piece(self, choice: Choice, step: Step) -> bytes:
        return b"".join(self._piece(choice.plan, delta) for delta in step.deltas)

    def closing(self, choices: Sequence[Choice]) -> bytes:
        (choice,) = choices
        opened = b"" if self._blocks else self._begin(choice.plan, None)
        used = _usage(choice)
        return (
            opened
            + self._finish()
            + _event("message_delta", delta=_ending(choice.plan), usage=used)
            + _event("message_stop")
        )

    def failure(self, error: ApiError) -> bytes:
        return event(error_body(error), "error")

    def _piece(self, plan: Plan, delta: Delta) -> bytes:
        begun = self._finish() + self._begin(plan, delta.call) if delta.is_first else b""
        more = {"type": "text_delta", "text": delta.text}
        if delta.call is not None:
            more = {"type": "input_json_delta", "partial_json": delta.text}
        return begun + _event("content_block_delta", index=self._blocks - 1, delta=more)

    def _begin(self, plan: Plan, call: int | None) -> bytes:
        text: Body = {"type": "text", "text": ""}
        block = text if call is None else _tool_use(plan.calls[call], {})
        self._blocks += 1
        return _event("content_block_start", index=self._blocks - 1, content_block=block)

    def _finish(self) -> bytes:
        if not self._blocks:
            return b""
        return _event("content_block_stop", index=self._blocks - 1)


def _event(name: str, **fields: Any) -> bytes:
    return event({"type": name, **fields}, name)


def _ending(plan: Plan) -> Body:
    reason, sequence = STOP_REASONS[plan.finish_reason], None
    if plan.calls and plan.finish_reason == "stop" and plan.stop_reason is None:
        reason = "tool_use"
    if isinstance(plan.stop_reason, str):
        reason, sequence = "stop_sequence", plan.stop_reason
    return {"stop_reason": reason, "stop_sequence": sequence}


def _tool_use(call: ToolCall, arguments: Any) -> Body:
    return {"type": "tool_use", "id": call.call_id, "name": call.name, "input": arguments}


def _input(arguments: str) -> Any:
    """The parsed arguments, or an empty object if they are cut off."""
    try:
        return json.loads(arguments)
    except ValueError:
        return {}


def _usage(choice: Choice) -> Body:
    used = usage_of([choice])
    cached = used["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": used["prompt_tokens"] - cached,
        "output_tokens": used["completion_tokens"],
        "cache_read_input_tokens": cached,
    }
