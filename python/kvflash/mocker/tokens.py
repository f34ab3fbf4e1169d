"""Converts requests of the runtime, which contain token ids, to engine parameters."""

from collections.abc import Mapping
from typing import Any

from kvflash.errors import InvalidArgumentError
from kvflash.mocker.block_hash import TOKEN_ID_MAX
from kvflash.mocker.config import MockerConfig
from kvflash.mocker.handover import Room, parse_room
from kvflash.mocker.protocol import COMPLETION_TOKENS, GenerationParams


def parse_tokens(request: Mapping[str, Any], config: MockerConfig) -> GenerationParams:
    """Validate a request; an InvalidArgumentError names the wrong field."""
    token_ids = request.get("token_ids")
    # type() and not isinstance(): true is not a token id.
    if not isinstance(token_ids, list) or not all(
        type(token_id) is int and 0 <= token_id <= TOKEN_ID_MAX for token_id in token_ids
    ):
        raise InvalidArgumentError("token_ids must be a list of token ids")
    if not token_ids:
        raise InvalidArgumentError("token_ids must have at least one token")
    room_left = config.model_len - len(token_ids)
    if room_left < 1:
        raise InvalidArgumentError(
            f"token_ids has {len(token_ids)} tokens, the context length is {config.model_len}"
        )
    max_tokens = _map(request, "stop_conditions").get("max_tokens")
    if max_tokens is None:
        max_tokens = min(room_left, COMPLETION_TOKENS)
    if type(max_tokens) is not int or not 1 <= max_tokens <= room_left:
        raise InvalidArgumentError(
            f"stop_conditions.max_tokens must be in 1..={room_left}, got {max_tokens!r}"
        )
    cache_salt = request.get("cache_salt") or None
    if cache_salt is not None and not isinstance(cache_salt, str):
        raise InvalidArgumentError(f"cache_salt must be text, got {cache_salt!r}")
    prefill = _map(request, "prefill_result")
    return GenerationParams(
        model=config.model_name,
        prompt_ids=token_ids,
        max_tokens=max_tokens,
        lora_name=_lora_name(request, config),
        cache_salt=cache_salt,
        is_streaming=True,
        has_usage_chunk=False,
        transfer=_map(prefill, "disaggregated_params").get("kv_transfer_params"),
    )


def request_room(request: Any) -> Room | None:
    """Where the prompt's KV is handed over, or None."""
    if not isinstance(request, Mapping):
        raise InvalidArgumentError(f"the request must be a map, got {type(request).__name__}")
    return parse_room(_map(request, "bootstrap_info"))


def _lora_name(request: Mapping[str, Any], config: MockerConfig) -> str | None:
    name = request.get("lora_name")
    if name in (None, "", config.model_name):
        return None
    if name not in config.lora_adapters:
        raise InvalidArgumentError(f"lora_name {name!r} is not one of {list(config.lora_adapters)}")
    return str(name)


def _map(request: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    value = request.get(field)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidArgumentError(f"{field} must be a map, got {type(value).__name__}")
    return value
