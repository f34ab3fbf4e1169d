"""Models: what a worker announces about the model that it serves."""

import json
import os
from dataclasses import dataclass
from enum import Enum, Flag, auto
from pathlib import Path
from typing import Any

from kvflash._core import model_folder
from kvflash.errors import ConfigError, InvalidArgumentError
from kvflash.runtime.arguments import check_range
from kvflash.runtime.component import Endpoint
from kvflash.runtime.distributed import MODELS

BLOCK_SIZE = 16
BLOCK_SIZE_MAX = 65_536
TOKENS_MAX = 2**31 - 1
LORAS_MAX = 1_024


class ModelInput(Enum):
    """Input of a worker's handler: token ids or text."""

    Tokens = "tokens"
    Text = "text"


class ModelType(Flag):
    """What a worker announces that it serves; combine several with ``|``.

    Frontends and routers read only whether a worker has ``Prefill``. All others get chats and
    completions.
    """

    Chat = auto()
    Completions = auto()
    Prefill = auto()
    Embedding = auto()

    def words(self) -> list[str]:
        """The request types as in a model card, such as ``["chat", "completions"]``."""
        return [kind.name.lower() for kind in ModelType if kind in self and kind.name]


@dataclass(kw_only=True)
class ModelRuntimeConfig:
    """What a worker's engine has room for, and how its model writes. None is unknown.

    Attributes:
        total_kv_blocks: Blocks of its cache, per dp rank.
        max_num_seqs: Requests in a batch.
        max_num_batched_tokens: Tokens in a batch.
        data_parallel_size: dp ranks.
        bootstrap_host: Where a prefill worker of SGLang's kind hands over, with bootstrap_port.
        bootstrap_port: See bootstrap_host.
        reasoning_parser: How the model marks its reasoning, a name that the frontend's
            --reasoning-parser takes; for workers that return tokens.
        tool_call_parser: How it writes tool calls, a name that --tool-call-parser takes.
    """

    total_kv_blocks: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    data_parallel_size: int = 1
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    reasoning_parser: str | None = None
    tool_call_parser: str | None = None

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Refuse numbers out of range, half of the bootstrap, and names that are no strings."""
        for name, most in (
            ("total_kv_blocks", TOKENS_MAX),
            ("max_num_seqs", TOKENS_MAX),
            ("max_num_batched_tokens", TOKENS_MAX),
            ("data_parallel_size", 1_024),
            ("bootstrap_port", 65_535),
        ):
            if (value := getattr(self, name)) is not None:
                setattr(self, name, check_range(name, value, 1, most))
        if (self.bootstrap_host is None) != (self.bootstrap_port is None):
            raise InvalidArgumentError(
                "set both bootstrap_host and bootstrap_port, or neither, got "
                f"{self.bootstrap_host!r} and {self.bootstrap_port!r}"
            )
        for name in ("bootstrap_host", "reasoning_parser", "tool_call_parser"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise InvalidArgumentError(f"{name} must be a string, got {value!r}")


def model_key(endpoint: Endpoint) -> str:
    """The discovery key of this process's model card."""
    return f"{MODELS}{endpoint.path}/{endpoint.runtime.instance_id}"


async def register_llm(  # noqa: PLR0917 - the order that workers know
    model_input: ModelInput,
    model_type: ModelType,
    endpoint: Endpoint,
    model_path: str | os.PathLike[str] | None = None,
    model_name: str | None = None,
    context_length: int | None = None,
    kv_cache_block_size: int | None = None,
    runtime_config: ModelRuntimeConfig | None = None,
    user_data: dict[str, Any] | None = None,
    *,
    lora_names: list[str] | None = None,
) -> None:
    """Announce that this process serves a model at an endpoint, for as long as it lives.

    Frontends that watch the same discovery add the model. Call this before serve_endpoint, which
    does not return. A second call replaces the first.

    Args:
        model_input: Whether the handler gets token ids or text.
        model_type: ``Prefill`` if the worker only prefills. Frontends send chats and completions to
            all other workers, whichever types they announce.
        endpoint: The endpoint that serves the model.
        model_path: Folder with tokenizer.json, which must also exist on the frontend's machine, or
            the id of a model in the local Hub cache. Another name, such as an id that is not in
            the cache, is only a name; a path (absolute, or with ./, ../ or ~/) must
            exist.
        model_name: Name in requests; default: model_path.
        context_length: Longest prompt including its answer; unit tokens.
        kv_cache_block_size: Tokens in a block; default 16.
        runtime_config: Capacity of the engine.
        user_data: Passed on unchanged; JSON.
        lora_names: Adapters that requests can select by name.

    Raises:
        InvalidArgumentError: An argument is invalid.
        TransportError: Discovery can't be reached.
    """
    if not isinstance(model_input, ModelInput):
        raise InvalidArgumentError(f"model_input must be a ModelInput, got {model_input!r}")
    if not isinstance(model_type, ModelType) or not model_type:
        raise InvalidArgumentError(f"model_type must be a ModelType, got {model_type!r}")
    for field, value, kind in (
        ("model_path", model_path, str | os.PathLike),
        ("model_name", model_name, str),
        ("runtime_config", runtime_config, ModelRuntimeConfig),
        ("lora_names", lora_names, list | tuple),
    ):
        if not (value is None or isinstance(value, kind)):
            wanted = getattr(kind, "__name__", kind)
            raise InvalidArgumentError(f"{field} must be of type {wanted}, got {value!r}")
    name = model_name or (None if model_path is None else os.fspath(model_path))
    if not name:
        raise InvalidArgumentError("model_name or model_path must be given")
    block_size = BLOCK_SIZE if kv_cache_block_size is None else kv_cache_block_size
    block_size = check_range("kv_cache_block_size", block_size, 1, BLOCK_SIZE_MAX)
    if context_length is not None:
        context_length = check_range("context_length", context_length, 1, TOKENS_MAX)
    if lora_names is not None and len(lora_names) > LORAS_MAX:
        raise InvalidArgumentError(
            f"lora_names may have at most {LORAS_MAX} entries, got {len(lora_names)}"
        )
    for lora in lora_names or ():
        if not isinstance(lora, str) or not lora:
            raise InvalidArgumentError(
                f"lora_names must be strings that are not empty, got {lora!r}"
            )
    config = runtime_config or ModelRuntimeConfig()
    config.check()
    bootstrap = None
    if config.bootstrap_host is not None:
        bootstrap = {"host": config.bootstrap_host, "port": config.bootstrap_port}
    card = {
        "model_name": name,
        "model_input": model_input.value,
        "model_type": model_type.words(),
        "kv_cache_block_size": block_size,
        "context_length": context_length,
        "tokenizer": _folder(model_path),
        "total_kv_blocks": config.total_kv_blocks,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_num_seqs": config.max_num_seqs,
        "dp_size": config.data_parallel_size,
        "lora_names": list(lora_names or []),
        "bootstrap": bootstrap,
        "reasoning_parser": config.reasoning_parser,
        "tool_call_parser": config.tool_call_parser,
        "user_data": user_data,
    }
    try:
        json.dumps(user_data, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"user_data must be JSON: {error}") from None
    await endpoint.runtime.announce(model_key(endpoint), card)


async def unregister_llm(endpoint: Endpoint) -> None:
    """Withdraw what register_llm announced.

    Raises:
        TransportError: Discovery can't be reached.
    """
    await endpoint.runtime.withdraw(model_key(endpoint))


def _folder(path: str | os.PathLike[str] | None) -> str | None:
    if path is None:
        return None
    if Path(path).is_dir():
        return str(Path(path).resolve())
    text = os.fspath(path)
    if text.startswith(("/", "./", "../", "~")) and not Path(text).exists():
        raise InvalidArgumentError(
            "model_path must be a folder with tokenizer.json, or the id of a model, got "
            f"{text!r}, which does not exist on this machine: correct it, or pass only model_name"
        )
    try:
        return str(Path(model_folder(text)).resolve())
    except ConfigError:
        return None  # Only a name.
