"""A trace of requests: one JSON object per line."""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvflash.console import reason_of
from kvflash.errors import ConfigError

#: Tokens that one of Mooncake's hash ids stands for.
MOONCAKE_BLOCK = 512
#: Token ids that exist in nearly every vocabulary and are not special tokens.
_TOKENS = range(1_000, 30_000)
_ANSWER_TOKENS = 16
# Numbers of a trace are smaller: as a time in milliseconds it is the year 33658.
_NUMBER_END = 1e15
_COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, kw_only=True)
class Call:
    """One request."""

    at_s: float  # Send time in seconds after the first request.
    path: str
    given: dict[str, Any]  # Its body, without the model if the trace names none.
    blocks: tuple[str, ...] = ()  # Mooncake's ids of blocks; () if ``given`` has a prompt.
    prompt_tokens: int = 0  # In these blocks.

    @property
    def body(self) -> dict[str, Any]:
        """The complete body; its tokens are generated here, as a trace has hundreds of millions."""
        if not self.blocks:
            return self.given
        tokens = [token for one in self.blocks for token in _tokens_of(one)]
        return {**self.given, "prompt": tokens[: self.prompt_tokens]}


def read_trace(path: str, *, limit: int | None = None) -> list[Call]:
    """The requests of a file, ordered by time; a ConfigError names the wrong line.

    A line has a time, ``timestamp`` in milliseconds or ``at`` in seconds, and a prompt:
    ``messages``, ``prompt`` (text or token ids), ``token_ids``, or Mooncake's ``hash_ids`` with
    ``input_length``, for which tokens are generated. ``max_tokens`` or ``output_length`` is the
    length of the answer, ``model`` the model. ``limit`` counts lines.
    """
    calls: list[Call] = []
    try:
        with Path(path).open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if limit is not None and len(calls) == limit:
                    break
                if line.strip():
                    calls.append(_call(line, f"{path}:{number}"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: can't be read: {reason_of(error)}") from None
    if not calls:
        raise ConfigError(f"{path}: has no requests; each line must be a JSON object with a prompt")
    calls.sort(key=lambda call: call.at_s)
    first_s = calls[0].at_s
    return [replace(one, at_s=one.at_s - first_s) for one in calls]


def _call(line: str, where: str) -> Call:
    try:
        given = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise ConfigError(f"{where}: must be a JSON object, got {line.strip()[:64]}")
    length = given.get("max_tokens", given.get("output_length", _ANSWER_TOKENS))
    body = {"max_tokens": max(1, int(_number(length, "max_tokens", where)))}
    body |= {name: given[name] for name in ("model",) if name in given}
    at_s = _time_s(given, where)
    if "messages" in given:
        body["messages"] = given["messages"]
        return Call(at_s=at_s, path="/v1/chat/completions", given=body)
    for name in ("prompt", "token_ids"):
        if name in given:
            prompt = _prompt(given[name], name, where)
            return Call(at_s=at_s, path=_COMPLETIONS, given={**body, "prompt": prompt})
    if not {"hash_ids", "input_length"} <= given.keys():
        raise ConfigError(
            f"{where}: needs messages, prompt, token_ids, or hash_ids with input_length; got "
            f"{', '.join(given)}"
        )
    ids, size = given["hash_ids"], int(_number(given["input_length"], "input_length", where))
    if not isinstance(ids, list) or not 0 < size <= len(ids) * MOONCAKE_BLOCK:
        raise ConfigError(
            f"{where}: input_length must be in 1..={MOONCAKE_BLOCK} tokens for each of hash_ids, "
            f"got {size}"
        )
    blocks = tuple(map(str, ids))
    return Call(at_s=at_s, path=_COMPLETIONS, given=body, blocks=blocks, prompt_tokens=size)


@lru_cache(maxsize=1_024)
def _tokens_of(block: str) -> list[int]:
    return random.Random(block).choices(_TOKENS, k=MOONCAKE_BLOCK)


def _time_s(given: Mapping[str, Any], where: str) -> float:
    for name, unit in (("timestamp", 1_000), ("at", 1)):
        if name in given:
            return _number(given[name], name, where) / unit
    raise ConfigError(f"{where}: needs a time: timestamp in milliseconds, or at in seconds")


def _prompt(value: Any, name: str, where: str) -> Any:
    if name == "prompt":
        # A list may be token ids or, as in OpenAI's API, several prompts.
        is_legal, kinds = isinstance(value, str | list), "text or a list of token ids"
    else:
        # Not isinstance(): a bool is no token.
        is_legal = isinstance(value, list) and all(type(one) is int and one >= 0 for one in value)
        kinds = "a list of integers of at least 0"
    if not is_legal:
        raise ConfigError(f"{where}: {name} must be {kinds}, got {value!r:.100}")
    return value


def _number(value: Any, name: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise ConfigError(f"{where}: {name} must be a number of at least 0, got {value!r}")
    if value >= _NUMBER_END:
        raise ConfigError(f"{where}: {name} must be less than {_NUMBER_END:g}, got {value!r}")
    return value
