"""A real vLLM started by `python -m kvflash.vllm`: opt-in, KVFLASH_VLLM names its program."""

from __future__ import annotations

import asyncio
import json
import os

import pytest

from kvflash.discovery import open_discovery
from service import VECTORS, EmbeddedIndexer, Http, Process, until

VLLM = os.environ.get("KVFLASH_VLLM")
LOAD_S = 300.0
MODEL = "tiny-llama"
BLOCK_SIZE = 32

pytestmark = [
    pytest.mark.real_engine,
    pytest.mark.timeout(2 * LOAD_S),
    pytest.mark.skipif(VLLM is None, reason="KVFLASH_VLLM names no vLLM (bin/vllm)"),
]

# As for the engines of the other tests: on a CPU, with random weights.
ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


def test_a_real_engine_is_found_and_its_events_say_what_it_reuses(tmp_path):
    folder = tmp_path / "discovery"
    process = Process(
        "kvflash.vllm", str(VECTORS / "tiny-llama"), "--served-model-name", MODEL,
        "--engine-command", f"nice -n 10 {VLLM} serve",
        "--load-format", "dummy", "--max-model-len", "2048", "--block-size", str(BLOCK_SIZE),
        "--enforce-eager", "--num-gpu-blocks-override", "192",
        env={**ENVIRONMENT, "KVFLASH_DISCOVERY_DIR": str(folder)},
    )  # fmt: skip
    indexer = EmbeddedIndexer()
    try:
        until(lambda: found(folder) or process.popen.poll() is not None, "the engine", LOAD_S)
        keys = found(folder)
        assert process.popen.poll() is None, "".join(process.errors)
        until(lambda: len(found(folder)) == 3, "all three keys")
        keys = {key.split("/")[1]: value for key, value in found(folder).items()}
        card, where = keys["models"], keys["events"]
        assert card["model_name"] == MODEL
        assert card["tokenizer"] == str((VECTORS / "tiny-llama").resolve())
        assert (card["kv_cache_block_size"], card["total_kv_blocks"]) == (BLOCK_SIZE, 192)
        assert card["context_length"] == 2048
        indexer.http.post("/register", {
            "instance_id": 1, "model_name": "m", "block_size": BLOCK_SIZE,
            "endpoint": where["endpoint"], "replay_endpoint": where["replay_endpoint"],
        }, expect=201)  # fmt: skip
        engine = Http(keys["instances"]["transport"]["url"])
        prompt = list(range(100, 100 + 4 * BLOCK_SIZE + 1))
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 2, "temperature": 0}
        engine.post("/v1/completions", body)
        query = {"token_ids": prompt, "model_name": "m"}
        held = {"0": 4 * BLOCK_SIZE}
        until(lambda: indexer.http.post("/query", query)["scores"].get("1") == held, "the blocks")
        usage = engine.post("/v1/completions", body)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 4 * BLOCK_SIZE
        engine.close()
        status = process.terminate(60)
        assert status in (0, 143), "".join(process.errors)
        assert found(folder) == {}
    finally:
        indexer.close()
        process.close()


def found(folder):
    async def look():
        discovery = open_discovery("file", folder=folder)
        values = await discovery.get_prefix("v1/")
        await discovery.close()
        return {key: json.loads(value) for key, value in values.items()}

    return asyncio.run(look())
