"""Names, settings, model cards: what is written, and what is refused."""

from __future__ import annotations

import asyncio
import errno
import json
import math
import socket
from pathlib import Path
from typing import Any

import pytest

from kvflash import (
    ConfigError,
    DistributedRuntime,
    InvalidArgumentError,
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    kvflash_worker,
    register_llm,
    unregister_llm,
)
from kvflash.runtime.settings import host_address, listen_address, own_address


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    for name in ("DISCOVERY", "STORE_KV", "REQUEST_PLANE", "HOST", "RUNTIME_PORT"):
        monkeypatch.delenv(f"KVFLASH_{name}", raising=False)
    for name in ("DYN_STORE_KV", "DYN_REQUEST_PLANE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KVFLASH_DISCOVERY_DIR", str(tmp_path))


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"KVFLASH_DISCOVERY": "zoo"}, "KVFLASH_DISCOVERY must be one of mem, file, etcd"),
        ({"DYN_STORE_KV": "zoo"}, "DYN_STORE_KV must be one of mem, file, etcd, got 'zoo'"),
        (
            {"KVFLASH_STORE_KV": "mem", "DYN_STORE_KV": "file"},
            "contradict each other: KVFLASH_STORE_KV=mem and DYN_STORE_KV=file",
        ),
        ({"KVFLASH_REQUEST_PLANE": "pigeon"}, "KVFLASH_REQUEST_PLANE must be one of tcp, http"),
        ({"DYN_REQUEST_PLANE": "tcp", "KVFLASH_REQUEST_PLANE": "http"}, "contradict each other"),
        ({"KVFLASH_RUNTIME_PORT": "65536"}, r"must be in 0\.\.=65535, got '65536'"),
    ],
)
def test_settings_that_can_not_work_are_refused(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], text: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=text):
        DistributedRuntime.detached()


def test_arguments_are_checked_as_the_environment_is() -> None:
    with pytest.raises(ConfigError, match="discovery must be one of mem, file, etcd, got 'x'"):
        DistributedRuntime("x")
    with pytest.raises(ConfigError, match="request_plane must be one of tcp, http, nats, got 'x'"):
        DistributedRuntime("mem", "x")
    for port in (99_999, -1, "80"):
        with pytest.raises(
            InvalidArgumentError, match=rf"port must be in 0\.\.=65535, got {port!r}"
        ):
            DistributedRuntime("mem", port=port)  # type: ignore[arg-type]


def test_a_timeout_is_a_number() -> None:
    async def scenario() -> None:
        async with DistributedRuntime("mem") as runtime:
            client = runtime.endpoint("n.c.e").client()
            for asked in (
                client.generate({}, timeout_s="1"),
                client.direct({}, 1, timeout_s="1"),  # type: ignore[arg-type]
                client.wait_for_instances("1"),  # type: ignore[arg-type]
            ):
                with pytest.raises(InvalidArgumentError, match=r"timeout_s must be a .* got '1'"):
                    await asked
            with pytest.raises(InvalidArgumentError, match=r"timeout_s must be a .* got nan"):
                await client.generate({}, timeout_s=math.nan)

    asyncio.run(scenario())


def test_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_address(is_local=True) == "127.0.0.1"
    assert host_address(is_local=False).count(".") == 3
    monkeypatch.setenv("KVFLASH_HOST", "worker-1.example")
    assert host_address(is_local=True) == "worker-1.example"
    for host, listened in (
        ("127.0.0.1", "127.0.0.1"),
        ("localhost", "localhost"),
        ("::1", "::1"),
        ("10.0.0.5", "0.0.0.0"),
        ("worker-1.example", "0.0.0.0"),
        ("fd00::5", "::"),
    ):
        assert listen_address(host) == listened


@pytest.mark.parametrize(
    ("host", "bound"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("localhost", "localhost"),
        ("10.0.0.5", "10.0.0.5"),
        ("fd00::5", "fd00::5"),
        ("private.example", "private.example"),
        # Known to this machine by its loopback address only.
        ("worker-1.example", "0.0.0.0"),
        ("gateway.example", "0.0.0.0"),
        ("198.51.100.7", "0.0.0.0"),
        ("fd00::7", "::"),
    ],
)
def test_sockets_without_login_listen_on_other_interfaces_only_if_they_must(
    host: str, bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {
        "127.0.0.1": "127.0.0.1",
        "localhost": "127.0.0.1",
        "worker-1.example": "127.0.1.1",
        "10.0.0.5": "10.0.0.5",
        "private.example": "10.0.0.5",
        "fd00::5": "fd00::5",
    }

    class Probe:
        def __init__(self, family: int) -> None:
            assert (family == socket.AF_INET6) is (":" in host)

        def __enter__(self) -> Probe:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def bind(self, address: tuple[str, int]) -> None:
            assert address == (host, 0)
            if host not in own:
                raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

        def getsockname(self) -> tuple[str, int]:
            return own[host], 40_000

    monkeypatch.setattr(socket, "socket", Probe)
    assert own_address(host) == bound


@pytest.mark.parametrize(
    ("routed", "address"),
    [
        ({socket.AF_INET: "10.0.0.5", socket.AF_INET6: "fd00::5"}, "10.0.0.5"),
        ({socket.AF_INET6: "fd00::5"}, "fd00::5"),
        ({}, "127.0.0.1"),
    ],
)
def test_the_address_is_that_of_the_route(
    routed: dict[int, str],
    address: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Probe:
        def __init__(self, family: int, _kind: int) -> None:
            self.family = family

        def __enter__(self) -> Probe:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def connect(self, _address: object) -> None:
            if self.family not in routed:
                raise OSError("Network is unreachable")

        def getsockname(self) -> tuple[str, int]:
            return routed[self.family], 9

    monkeypatch.setattr(socket, "socket", Probe)
    assert host_address(is_local=False) == address
    # An address that no other machine reaches is named.
    assert ("set KVFLASH_HOST" in caplog.text) is not bool(routed)


@pytest.mark.parametrize("name", ["", "a.b", "a/b", "a b", "ü", "x" * 49, None, 7])
def test_names_that_a_key_could_not_hold_are_refused(name: Any) -> None:
    runtime = DistributedRuntime("mem")
    with pytest.raises(InvalidArgumentError, match="namespace must have 1 to 48"):
        runtime.namespace(name)
    with pytest.raises(InvalidArgumentError, match="component must have 1 to 48"):
        runtime.namespace("n").component(name)
    with pytest.raises(InvalidArgumentError, match="endpoint must have 1 to 48"):
        runtime.namespace("n").component("c").endpoint(name)


def test_endpoints_by_path() -> None:
    runtime = DistributedRuntime("mem")
    for path in ("n.c.e", "n/c/e", "dyn://n.c.e"):
        endpoint = runtime.endpoint(path)
        assert endpoint.path == "n/c/e"
        assert endpoint.instance_id() == endpoint.lease_id() == runtime.instance_id
    with pytest.raises(InvalidArgumentError, match=r"namespace\.component\.endpoint, got 'a\.b'"):
        runtime.endpoint("a.b")


def test_the_model_card(tmp_path: Any) -> None:
    async def scenario() -> None:
        async with DistributedRuntime("mem") as runtime:
            endpoint = runtime.endpoint("n.c.e")
            key = f"v1/models/n/c/e/{runtime.instance_id}"
            await register_llm(
                model_input=ModelInput.Tokens,
                model_type=ModelType.Chat | ModelType.Completions,
                endpoint=endpoint,
                model_name="meta-llama/Llama-2-7b-hf",
            )
            [card] = (await runtime.discovery.get_prefix("v1/models/n/")).values()
            assert json.loads(card) == {
                "model_name": "meta-llama/Llama-2-7b-hf",
                "model_input": "tokens",
                "model_type": ["chat", "completions"],
                "kv_cache_block_size": 16,
                "context_length": None,
                "tokenizer": None,
                "total_kv_blocks": None,
                "max_num_batched_tokens": None,
                "max_num_seqs": None,
                "dp_size": 1,
                "lora_names": [],
                "bootstrap": None,
                "reasoning_parser": None,
                "tool_call_parser": None,
                "user_data": None,
            }
            # A second call replaces the first.
            config = ModelRuntimeConfig(
                total_kv_blocks=100,
                max_num_seqs=8,
                max_num_batched_tokens=2048,
                data_parallel_size=2,
                bootstrap_host="10.0.0.1",
                bootstrap_port=8998,
                reasoning_parser="qwen3",
                tool_call_parser="hermes",
            )
            await register_llm(
                ModelInput.Text,
                ModelType.Prefill,
                endpoint,
                tmp_path,
                context_length=4096,
                kv_cache_block_size=32,
                runtime_config=config,
                user_data={"a": [1]},
                lora_names=["x"],
            )
            cards = await runtime.discovery.get_prefix("v1/models/n/")
            assert list(cards) == [key]
            assert json.loads(cards[key]) == {
                "model_name": str(tmp_path),
                "model_input": "text",
                "model_type": ["prefill"],
                "kv_cache_block_size": 32,
                "context_length": 4096,
                "tokenizer": str(tmp_path.resolve()),
                "total_kv_blocks": 100,
                "max_num_batched_tokens": 2048,
                "max_num_seqs": 8,
                "dp_size": 2,
                "lora_names": ["x"],
                "bootstrap": {"host": "10.0.0.1", "port": 8998},
                "reasoning_parser": "qwen3",
                "tool_call_parser": "hermes",
                "user_data": {"a": [1]},
            }
            await unregister_llm(endpoint)
            assert await runtime.discovery.get_prefix("v1/models/n/") == {}
            await unregister_llm(endpoint)
            await register_llm(ModelInput.Text, ModelType.Chat, endpoint, model_name="m")
            discovery = runtime.discovery
            assert await discovery.get_prefix("v1/models/n/")
        async with DistributedRuntime("mem") as other:
            assert await other.discovery.get_prefix("v1/models/n/") == {}

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"model_input": "tokens"}, "model_input must be a ModelInput, got 'tokens'"),
        ({"model_type": "chat"}, "model_type must be a ModelType, got 'chat'"),
        ({"model_type": ModelType(0)}, "model_type must be a ModelType"),
        ({"model_name": ""}, "model_name or model_path must be given"),
        ({"kv_cache_block_size": 0}, r"kv_cache_block_size must be in 1\.\.=65536, got 0"),
        ({"context_length": -1}, r"context_length must be in 1\.\.=2147483647, got -1"),
        ({"context_length": True}, "context_length must be in"),
        ({"lora_names": ["x"] * 1025}, "lora_names may have at most 1024 entries, got 1025"),
        ({"lora_names": "x"}, "lora_names must be of type list"),
        ({"lora_names": ["x", 5]}, "lora_names must be strings that are not empty, got 5"),
        ({"lora_names": ("x", "")}, "lora_names must be strings that are not empty, got ''"),
        ({"model_name": 5}, "model_name must be of type str, got 5"),
        ({"model_path": 5}, "model_path must be of type str"),
        ({"model_path": "/no/folder"}, "'/no/folder', which does not exist on this machine"),
        ({"model_path": Path("/no/folder")}, "correct it, or pass only model_name"),
        ({"model_path": "./no-folder"}, "model_path must be a folder with tokenizer.json, or"),
        ({"runtime_config": {"max_num_seqs": 1}}, "runtime_config must be of type ModelRuntime"),
        ({"user_data": {1}}, "user_data must be JSON"),
        ({"user_data": {"a": math.nan}}, "user_data must be JSON"),
    ],
)
def test_a_model_card_that_can_not_be_is_refused(changed: dict[str, Any], text: str) -> None:
    async def scenario() -> None:
        async with DistributedRuntime("mem") as runtime:
            arguments: dict[str, Any] = {
                "model_input": ModelInput.Tokens,
                "model_type": ModelType.Chat,
                "endpoint": runtime.endpoint("n.c.e"),
                "model_name": "m",
                **changed,
            }
            with pytest.raises(InvalidArgumentError, match=text):
                await register_llm(**arguments)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be in"),
        ({"data_parallel_size": 1025}, r"data_parallel_size must be in 1\.\.=1024, got 1025"),
        ({"data_parallel_size": "2"}, "data_parallel_size must be in"),
        ({"bootstrap_port": 1}, "or neither, got None and 1"),
        ({"bootstrap_port": 1, "bootstrap_host": 2}, "bootstrap_host must be a string, got 2"),
        ({"tool_call_parser": 1}, "tool_call_parser must be a string, got 1"),
    ],
)
def test_what_an_engine_can_not_be_is_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        ModelRuntimeConfig(**settings)


def test_the_worker_decorator_gives_a_runtime_and_closes_it() -> None:
    @kvflash_worker()
    async def worker(runtime: DistributedRuntime, number: int) -> tuple[DistributedRuntime, int]:
        """Work."""
        await runtime.announce("k", 1)
        return runtime, number

    _, number = asyncio.run(worker(7))
    assert number == 7
    assert worker.__doc__ == "Work."

    async def is_gone() -> None:
        async with DistributedRuntime() as other:
            assert await other.discovery.get_prefix("k") == {}

    asyncio.run(is_gone())
