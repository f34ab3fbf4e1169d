"""Converts requests to engine parameters: OpenAI's, and those of the runtime with token ids.

Sampling options have no effect.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvflash.mocker.blocks import TOKEN_ID_MAX
from kvflash.mocker.config import MockerConfig
from kvflash.mocker.fields import (
    ApiError,
    Body,
    Fields,
    boolean,
    inner,
    integer,
    is_integer,
    is_text,
    mapping,
    read,
    refuse,
    shown,
    text,
)
from kvflash.mocker.handover import ROOM_FIELDS, parse_transfer
from kvflash.mocker.options import AnswerOptions, parse_options, parse_tools
from kvflash.mocker.tokenizer import Tokenizer

# Output tokens of a request without a limit: a completion is cut there, a chat's text ends.
COMPLETION_TOKENS = 16
CHAT_TOKENS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationParams:
    """A validated request for an answer."""

    model: str
    prompt_ids: Sequence[int]
    max_tokens: int
    lora_name: str | None
    cache_salt: str | None
    is_streaming: bool  # Answer with server-sent events.
    has_usage_chunk: bool  # End the stream with a chunk of usage.
    has_token_ids: bool = False  # Include the tokens of the answer.
    transfer: Fields = field(default_factory=dict)  # kv_transfer_params.
    options: AnswerOptions = field(default_factory=AnswerOptions)
    engine: int | None = None  # Number of the engine; None: the one with the fewest requests.


def parse_json(data: bytes) -> Body:
    """Parse a request body; refuses anything but a JSON object."""
    try:
        # Strictly, other than json.loads() decodes bytes: it lets surrogates pass.
        decoded = data.decode(json.detect_encoding(data))
        body = json.loads(decoded)
    # RecursionError: a few kilobytes of brackets suffice.
    except (ValueError, RecursionError) as error:
        refuse(f"the request body is not JSON: {error}")
    if not isinstance(body, dict):
        refuse("the request body must be a JSON object")
    if "\\ud" in decoded or "\\uD" in decoded:
        try:
            json.dumps(body, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            refuse(f"the request body has an unpaired surrogate: {error}")
    return body


def shared(body: Body) -> Body:
    """The fields that all generating APIs have in common."""
    names = ("model", "stream", "cache_salt", "seed", "kv_transfer_params", *ROOM_FIELDS)
    return {name: body[name] for name in names if name in body}


def content_of(texts: list[str]) -> str | list[Body]:
    """The content of a message with these texts: several become parts; empty ones are dropped."""
    texts = [text for text in texts if text]
    if len(texts) > 1:
        return [{"type": "text", "text": text} for text in texts]
    return "".join(texts)


def response_format(told: object) -> Any:
    """The form of a chat's text, from the field `format` of another API."""
    form = inner(told, "format")
    if inner(form, "type") == "json_schema":
        return {"type": "json_schema", "json_schema": form}
    return form


def function_call(call_id: object, name: str, arguments: str) -> Body:
    """A tool call in the form of chats."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def parse_model(body: Body, config: MockerConfig) -> str:
    """The requested model or LoRA adapter; refuses unknown ones with 404."""
    model = body.get("model")
    if model is None:
        return config.model_name
    if model != config.model_name and model not in config.lora_adapters:
        raise ApiError(404, "NotFoundError", f"The model `{model}` does not exist.", "model")
    return str(model)


def parse_generation(
    body: Body,
    *,
    is_chat: bool,
    config: MockerConfig,
    tokenizer: Tokenizer,
    text_tokens: int | None = None,
) -> GenerationParams:
    """Check a chat or completion and tokenize its prompt; refuses with 404 or 400."""
    model = parse_model(body, config)
    is_streaming = boolean(body, "stream")
    options = mapping(body, "stream_options")
    prompt_ids = parse_prompt(body, is_chat=is_chat, tokenizer=tokenizer)
    room = _room(len(prompt_ids), "messages" if is_chat else "prompt", config)
    asked = _max_tokens(body, "max_completion_tokens", room, config)
    max_tokens = asked or _max_tokens(body, "max_tokens", room, config)
    if max_tokens is None:
        max_tokens = room if is_chat else min(room, COMPLETION_TOKENS)
        text_tokens = text_tokens or (CHAT_TOKENS if is_chat else None)
    return GenerationParams(
        model=model,
        prompt_ids=prompt_ids,
        max_tokens=max_tokens,
        lora_name=None if model == config.model_name else model,
        cache_salt=text(body, "cache_salt"),
        is_streaming=is_streaming,
        has_usage_chunk=is_streaming and boolean(options, "include_usage"),
        has_token_ids=boolean(body, "return_token_ids"),
        transfer=parse_transfer(body),
        options=parse_options(body, is_chat=is_chat, text_tokens=text_tokens),
    )


def parse_tokens(request: Fields, config: MockerConfig) -> GenerationParams:
    """Check a request of the runtime; an InvalidArgumentError names the wrong field."""
    prompt_ids = parse_token_ids(request.get("token_ids"), "token_ids")
    room = _room(len(prompt_ids), "token_ids", config)
    lora_name = read(request, "lora_name", is_text, "text") or config.model_name
    if lora_name != config.model_name and lora_name not in config.lora_adapters:
        refuse(f"lora_name {lora_name!r} is not one of {list(config.lora_adapters)}", "lora_name")
    result = mapping(mapping(request, "prefill_result"), "disaggregated_params")
    limit = "stop_conditions.max_tokens"
    named = {limit: mapping(request, "stop_conditions").get("max_tokens")}
    asked = _max_tokens(named, limit, room, config)
    rank = integer(request, "dp_rank", config.ranks[0], config.ranks[-1])
    return GenerationParams(
        model=config.model_name,
        prompt_ids=prompt_ids,
        max_tokens=asked or min(room, COMPLETION_TOKENS),
        lora_name=None if lora_name == config.model_name else lora_name,
        cache_salt=read(request, "cache_salt", is_text, "text") or None,
        is_streaming=True,
        has_usage_chunk=False,
        transfer=parse_transfer(result),
        # All the room is what a frontend names for a chat without a limit: its text ends before.
        options=AnswerOptions(text_tokens=CHAT_TOKENS if asked == room else None),
        engine=None if rank is None else config.ranks.index(rank),
    )


def parse_prompt(body: Body, *, is_chat: bool, tokenizer: Tokenizer) -> list[int]:
    """Tokens of the prompt of a chat, completion or tokenize request; refuses malformed ones."""
    if is_chat:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
            refuse(
                "messages must be a non-empty list of objects with a role, and with a function in "
                "each of their tool_calls",
                "messages",
            )
        add_prompt = boolean(body, "add_generation_prompt", True)
        parse_tools(body)
        try:
            rendered = tokenizer.render_chat(
                messages, add_generation_prompt=add_prompt, tools=body.get("tools")
            )
        except ValueError as error:
            refuse(f"the chat template refuses the messages: {error}", "messages")
        # vLLM's clients may send the tokens besides the messages.
        given = mapping(body, "kv_transfer_params").get("prompt_token_ids")
        if given is not None:
            return parse_token_ids(given, "kv_transfer_params.prompt_token_ids")
        # The template writes the special tokens itself.
        return tokenizer.encode(rendered, add_special_tokens=boolean(body, "add_special_tokens"))
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str):
        is_special = boolean(body, "add_special_tokens", True)
        return tokenizer.encode(prompt, add_special_tokens=is_special)
    return parse_token_ids(prompt, "prompt", "one string or one list of token ids")


def parse_token_ids(value: object, param: str, wanted: str = "a list of token ids") -> list[int]:
    """The value, which must be a list of token ids; else it is refused."""
    wanted = f"{param} must be {wanted} in 0..={TOKEN_ID_MAX}"
    if not isinstance(value, list):
        refuse(f"{wanted}, got {shown(value)}", param)
    wrong = [one for one in value if not (is_integer(one) and 0 <= one <= TOKEN_ID_MAX)]
    if wrong:
        refuse(f"{wanted}, got a list with {shown(wrong[0])}", param)
    return value


def decode(token_ids: Sequence[int], param: str, tokenizer: Tokenizer) -> str:
    """The text of token ids; refuses unknown ones."""
    try:
        return tokenizer.decode(token_ids)
    except (ValueError, OverflowError) as error:
        refuse(f"{param} cannot be decoded: {error}", param)


def _is_message(message: object) -> bool:
    if not is_text(inner(message, "role")):
        return False
    calls = inner(message, "tool_calls")
    return calls is None or (isinstance(calls, list) and all(map(_is_call, calls)))


def _is_call(call: object) -> bool:
    return all(is_text(inner(call, "function", name)) for name in ("name", "arguments"))


def _room(prompt_tokens: int, param: str, config: MockerConfig) -> int:
    """Tokens that are left for the answer, at least one."""
    if prompt_tokens == 0:
        refuse(f"{param} must have at least one token", param)
    if prompt_tokens >= config.model_len:
        refuse(
            f"This model's maximum context length is {config.model_len} tokens, but {param} alone "
            f"has {prompt_tokens}.",
            param,
        )
    return config.model_len - prompt_tokens


def _max_tokens(fields: Fields, name: str, room: int, config: MockerConfig) -> int | None:
    why = f" (a context of {config.model_len} tokens less the prompt)"
    found: int | None = integer(fields, name, 1, room, why=why)
    return found
