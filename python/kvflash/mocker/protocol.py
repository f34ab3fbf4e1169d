"""Converts OpenAI request bodies to engine parameters; sampling options have no effect."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvflash.errors import InvalidArgumentError
from kvflash.mocker.block_hash import TOKEN_ID_MAX
from kvflash.mocker.config import MockerConfig
from kvflash.mocker.fields import ApiError, Body, boolean, refuse
from kvflash.mocker.handover import Room, is_handed_over, parse_room
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
    transfer: Mapping[str, Any] | None = None  # kv_transfer_params.
    options: AnswerOptions = field(default_factory=AnswerOptions)


def parse_json(data: bytes) -> Body:
    """Parse a request body; refuses anything but a JSON object."""
    try:
        body = json.loads(data)
    # RecursionError: a few kilobytes of brackets suffice.
    except (ValueError, RecursionError) as error:
        refuse(f"the request body is not JSON: {error}")
    if not isinstance(body, dict):
        refuse("the request body must be a JSON object")
    if b"\\ud" in data or b"\\uD" in data:
        try:
            json.dumps(body, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            refuse(f"the request body has an unpaired surrogate: {error}")
    return body


def shared(body: Body) -> Body:
    """The fields that all generating APIs have in common."""
    names = ("model", "stream", "cache_salt", "seed", "kv_transfer_params")
    return {name: body[name] for name in names if name in body}


def content_of(texts: list[str]) -> str | list[Body]:
    """The content of a message with these texts: several become parts; empty ones are dropped."""
    texts = [text for text in texts if text]
    if len(texts) > 1:
        return [{"type": "text", "text": text} for text in texts]
    return "".join(texts)


def response_format(told: Any) -> Body | None:
    """The form of a chat's text, from the field `format` of another API."""
    form = told.get("format") if isinstance(told, dict) else None
    if isinstance(form, dict) and form.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": form}
    return form


def function_call(call_id: object, name: str, arguments: str) -> Body:
    """A tool call in the form of chats."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def listed_tools(told: Any) -> list[Body]:
    """The tools of a request of any API; refused if they are not objects."""
    if not isinstance(told, list) or not all(isinstance(tool, dict) for tool in told):
        refuse("tools must be a list of objects", "tools")
    return told


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
    cache_salt = body.get("cache_salt")
    if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
        refuse("cache_salt must be a non-empty string", "cache_salt")
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        refuse("stream_options must be an object", "stream_options")
    is_streaming = boolean(body, "stream")
    transfer = body.get("kv_transfer_params")
    try:
        is_handed_over(transfer)
    except InvalidArgumentError as error:
        refuse(str(error), "kv_transfer_params")
    prompt_ids = parse_prompt(body, is_chat=is_chat, tokenizer=tokenizer)
    max_tokens = _max_tokens(body, len(prompt_ids), is_chat=is_chat, config=config)
    if max_tokens is None:
        room = config.model_len - len(prompt_ids)
        max_tokens = room if is_chat else min(room, COMPLETION_TOKENS)
        text_tokens = text_tokens or (CHAT_TOKENS if is_chat else None)
    return GenerationParams(
        model=model,
        prompt_ids=prompt_ids,
        max_tokens=max_tokens,
        lora_name=None if model == config.model_name else model,
        cache_salt=cache_salt,
        is_streaming=is_streaming,
        has_usage_chunk=is_streaming and boolean(options or {}, "include_usage"),
        has_token_ids=boolean(body, "return_token_ids"),
        transfer=transfer,
        options=parse_options(body, is_chat=is_chat, text_tokens=text_tokens),
    )


def parse_bootstrap(body: Body) -> Room | None:
    """Where the prompt's KV is handed over, or None; refuses an invalid room."""
    try:
        return parse_room(body)
    except InvalidArgumentError as error:
        refuse(str(error), str(error).split()[0])


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
            text = tokenizer.render_chat(
                messages, add_generation_prompt=add_prompt, tools=body.get("tools")
            )
        except ValueError as error:
            refuse(f"the chat template refuses the messages: {error}", "messages")
        # vLLM's clients may send the tokens besides the messages.
        transfer = body.get("kv_transfer_params")
        given = transfer.get("prompt_token_ids") if isinstance(transfer, dict) else None
        if given is not None:
            return parse_token_ids(given, "kv_transfer_params.prompt_token_ids")
        # The template writes the special tokens itself.
        return tokenizer.encode(text, add_special_tokens=boolean(body, "add_special_tokens"))
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str):
        is_special = boolean(body, "add_special_tokens", True)
        return tokenizer.encode(prompt, add_special_tokens=is_special)
    return parse_token_ids(prompt, "prompt")


def parse_token_ids(value: object, param: str) -> list[int]:
    """The value, which must be a list of token ids; else it is refused."""
    # type() and not isinstance(): true is not a token id.
    if not isinstance(value, list) or not all(
        type(token_id) is int and 0 <= token_id <= TOKEN_ID_MAX for token_id in value
    ):
        refuse(f"{param} must be one string or one list of token ids", param)
    return value


def _is_message(message: object) -> bool:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    calls = message.get("tool_calls")
    return calls is None or (isinstance(calls, list) and all(map(_is_call, calls)))


def _is_call(call: object) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and all(
        isinstance(function.get(name), str) for name in ("name", "arguments")
    )


def _max_tokens(
    body: Body, prompt_tokens: int, *, is_chat: bool, config: MockerConfig
) -> int | None:
    room = config.model_len - prompt_tokens
    most = f"This model's maximum context length is {config.model_len} tokens, but"
    prompt = "messages" if is_chat else "prompt"
    if prompt_tokens == 0:
        refuse("the prompt must have at least one token", prompt)
    if room < 1:
        refuse(f"{most} the prompt alone has {prompt_tokens}.", prompt)
    for name in ("max_completion_tokens", "max_tokens"):
        asked = body.get(name)
        if asked is None:
            continue
        if type(asked) is not int or asked < 1:
            refuse(f"{name} must be an integer of at least 1", name)
        if asked > room:
            told = f"{prompt_tokens} of the prompt and {asked} of {name} were asked for."
            refuse(f"{most} {told}", name)
        return asked
    return None
