"""OpenAI request bodies to what the engine needs, and its answers to OpenAI response bodies.

Only what a router or a benchmark relies on is understood; sampling options change nothing here and
are ignored. Options that would change the shape of the answer and are not supported are refused.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvflash.errors import InvalidArgumentError
from kvflash.mocker.block_hash import TOKEN_ID_MAX
from kvflash.mocker.config import MockerConfig
from kvflash.mocker.handover import Room, is_handed_over, parse_room
from kvflash.mocker.refusal import ApiError, Body, refuse
from kvflash.mocker.request import Lora, Request
from kvflash.mocker.tokenizer import Tokenizer

# Output tokens of a request that does not say how many.
COMPLETION_TOKENS = 16
CHAT_TOKENS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationParams:
    """A checked request for an answer.

    Attributes:
        model: Name it was asked for.
        prompt_ids: Tokens of the prompt.
        max_tokens: Output tokens.
        lora: LoRA adapter, or None.
        cache_salt: Cache salt, or None.
        is_streaming: Answer with server-sent events.
        has_usage_chunk: End the stream with a chunk of usage.
        has_token_ids: Tell the tokens of the answer beside its text.
        transfer: kv_transfer_params, or None.
    """

    model: str
    prompt_ids: Sequence[int]
    max_tokens: int
    lora: Lora | None
    cache_salt: str | None
    is_streaming: bool
    has_usage_chunk: bool
    has_token_ids: bool = False
    transfer: Mapping[str, Any] | None = None


def parse_json(data: bytes) -> Body:
    """Parse a request body.

    Raises:
        ApiError: Not a JSON object.
    """
    try:
        body = json.loads(data)
    # RecursionError: a few kilobytes of brackets are enough.
    except (ValueError, RecursionError) as error:
        refuse(f"the request body is not JSON: {error}")
    if not isinstance(body, dict):
        refuse("the request body must be a JSON object")
    return body


def shared(body: Body) -> Body:
    """The fields that all APIs with a generated answer have in common."""
    return {name: body[name] for name in ("model", "stream", "cache_salt") if name in body}


def parse_model(body: Body, config: MockerConfig) -> tuple[str, Lora | None]:
    """Name of the model that is asked for, and its LoRA adapter.

    Raises:
        ApiError: 404, there is no such model.
    """
    model = body.get("model")
    if model is None or model == config.model_name:
        return config.model_name, None
    if not isinstance(model, str) or model not in config.lora_adapters:
        raise ApiError(404, "NotFoundError", f"The model `{model}` does not exist.", "model")
    return model, Lora(config.lora_adapters.index(model) + 1, model)


def parse_generation(
    body: Body, *, is_chat: bool, config: MockerConfig, tokenizer: Tokenizer
) -> GenerationParams:
    """Check a chat or completion request and tokenize its prompt.

    Raises:
        ApiError: 404 for an unknown model, 400 for everything else.
    """
    model, lora = parse_model(body, config)
    if body.get("n") not in (None, 1):
        refuse("only n = 1 is supported", "n")
    if body.get("echo"):
        refuse("echo is not supported", "echo")
    cache_salt = body.get("cache_salt")
    if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
        refuse("cache_salt must be a non-empty string", "cache_salt")
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        refuse("stream_options must be an object", "stream_options")
    is_streaming = _boolean(body, "stream", False)
    transfer = body.get("kv_transfer_params")
    try:
        is_handed_over(transfer)
    except InvalidArgumentError as error:
        refuse(str(error), "kv_transfer_params")
    prompt_ids = parse_prompt(body, is_chat=is_chat, tokenizer=tokenizer)
    return GenerationParams(
        model=model,
        prompt_ids=prompt_ids,
        max_tokens=_max_tokens(body, len(prompt_ids), is_chat=is_chat, config=config),
        lora=lora,
        cache_salt=cache_salt,
        is_streaming=is_streaming,
        has_usage_chunk=is_streaming and _boolean(options or {}, "include_usage", False),
        has_token_ids=_boolean(body, "return_token_ids", False),
        transfer=transfer,
    )


def parse_bootstrap(body: Body) -> Room | None:
    """Where the prompt's KV is handed over, or None.

    Raises:
        ApiError: It is no room.
    """
    try:
        return parse_room(body)
    except InvalidArgumentError as error:
        refuse(str(error), str(error).split()[0])


def parse_prompt(body: Body, *, is_chat: bool, tokenizer: Tokenizer) -> list[int]:
    """Tokens of the prompt of a chat, completion or tokenize request.

    Raises:
        ApiError: The prompt or the messages are malformed.
    """
    if is_chat:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
            refuse("messages must be a non-empty list of objects with a role", "messages")
        add_prompt = _boolean(body, "add_generation_prompt", True)
        try:
            text = tokenizer.render_chat(messages, add_generation_prompt=add_prompt)
        except ValueError as error:
            refuse(f"the chat template refuses the messages: {error}", "messages")
        if (given := _reused_ids(body)) is not None:
            return given
        # The template writes the special tokens itself.
        return tokenizer.encode(
            text, add_special_tokens=_boolean(body, "add_special_tokens", False)
        )
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return tokenizer.encode(
            prompt, add_special_tokens=_boolean(body, "add_special_tokens", True)
        )
    return parse_token_ids(prompt, "prompt")


def _reused_ids(body: Body) -> list[int] | None:
    """The ids that a chat brings beside its messages, as vLLM takes them."""
    transfer = body.get("kv_transfer_params")
    given = transfer.get("prompt_token_ids") if isinstance(transfer, dict) else None
    if given is None:
        return None
    return parse_token_ids(given, "kv_transfer_params.prompt_token_ids")


def parse_token_ids(value: object, param: str) -> list[int]:
    """Check a list of token ids.

    Raises:
        ApiError: It is something else.
    """
    # type() and not isinstance(): true is no token id.
    if not isinstance(value, list) or not all(
        type(token_id) is int and 0 <= token_id <= TOKEN_ID_MAX for token_id in value
    ):
        refuse(f"{param} must be one string or one list of token ids", param)
    return value


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str)


def _boolean(body: Mapping[str, Any], name: str, default: bool) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        refuse(f"{name} must be true or false", name)
    return value


def _max_tokens(body: Body, prompt_tokens: int, *, is_chat: bool, config: MockerConfig) -> int:
    room = config.model_len - prompt_tokens
    if prompt_tokens == 0:
        refuse("the prompt must have at least one token", "messages" if is_chat else "prompt")
    if room < 1:
        refuse(
            f"This model's maximum context length is {config.model_len} tokens, "
            f"but the prompt alone has {prompt_tokens}.",
            "messages" if is_chat else "prompt",
        )
    for name in ("max_completion_tokens", "max_tokens"):
        asked = body.get(name)
        if asked is None:
            continue
        if type(asked) is not int or asked < 1:
            refuse(f"{name} must be an integer of at least 1", name)
        if asked > room:
            refuse(
                f"This model's maximum context length is {config.model_len} tokens, but "
                f"{prompt_tokens} of the prompt and {asked} of {name} were asked for.",
                name,
            )
        return asked
    return min(room, CHAT_TOKENS if is_chat else COMPLETION_TOKENS)


def usage(request: Request) -> Body:
    """The usage of a finished request."""
    prompt_tokens = len(request.prompt_ids)
    completion_tokens = len(request.tokens) - prompt_tokens
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": request.cached_tokens or 0},
    }


class CompletionAnswer:
    """Builds the bodies of one chat or completion: the whole of it, or its chunks."""

    def __init__(self, answer_id: str, model: str, *, is_chat: bool) -> None:
        """Start an answer.

        Args:
            answer_id: Its id, without the prefix that says what kind it is.
            model: Name the model was asked for.
            is_chat: Chat or text completion.
        """
        self._is_chat = is_chat
        self._head = {
            "id": ("chatcmpl-" if is_chat else "cmpl-") + answer_id,
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, text: str, request: Request, token_ids: list[int] | None = None) -> Body:
        """The body of an answer that is not streamed."""
        choice: Body = {"index": 0, "logprobs": None, "finish_reason": "length"}
        if token_ids is not None:
            choice["token_ids"] = token_ids
        if self._is_chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        kind = "chat.completion" if self._is_chat else "text_completion"
        return {**self._head, "object": kind, "choices": [choice], "usage": usage(request)}

    def opening_chunk(self) -> Body | None:
        """The chunk that names the role, for a chat."""
        return self._chunk({"role": "assistant", "content": ""}, None) if self._is_chat else None

    def text_chunk(self, text: str, *, is_last: bool, token_ids: list[int] | None = None) -> Body:
        """A chunk of text, with its tokens if they are to be told."""
        reason = "length" if is_last else None
        chunk = self._chunk({"content": text} if self._is_chat else text, reason)
        if token_ids is not None:
            chunk["choices"][0]["token_ids"] = token_ids
        return chunk

    def usage_chunk(self, request: Request) -> Body:
        """The chunk after the last one, with the usage."""
        return {**self._head, "object": self._kind, "choices": [], "usage": usage(request)}

    @property
    def _kind(self) -> str:
        return "chat.completion.chunk" if self._is_chat else "text_completion"

    def _chunk(self, content: object, finish_reason: str | None) -> Body:
        choice = {
            "index": 0,
            "delta" if self._is_chat else "text": content,
            "logprobs": None,
            "finish_reason": finish_reason,
        }
        return {**self._head, "object": self._kind, "choices": [choice]}
