"""Documents that users bring along run as they are, through ``kvflash.compat.dynamo``.

``KVFLASH_REFERENCE_DOCUMENTS`` is the folder of these Markdown files. Nothing of them is here: a
block is known by what it calls.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support_markdown import Block, read_blocks
from support_stage import TINY_LLAMA, Stage, items, run_fragment

from kvflash import KvPushRouter, KvRouterConfig
from kvflash.compat.dynamo.classes import DistributedRuntime
from service import Http, Process, until

FOLDER = os.environ.get("KVFLASH_REFERENCE_DOCUMENTS", "")
FILES = ("000_kv_routing.md", "001_router_guide.md", "003_kv_routing.md")
NOT_CODE = {"mermaid", "text"}
BACKEND = "dynamo.backend.generate"
TOKENS = list(range(1, 40))

pytestmark = pytest.mark.skipif(
    not FOLDER, reason="KVFLASH_REFERENCE_DOCUMENTS does not name the folder of the documents"
)


def blocks() -> list[Block]:
    found = [b for name in FILES for b in read_blocks(Path(FOLDER) / name)] if FOLDER else []
    return [block for block in found if block.language not in NOT_CODE]


BLOCKS = blocks()


def model_of(block: Block) -> str:
    """The model that a block names."""
    names = re.findall(r'model(?:_name)?"?\s*[=:]\s*"([^"]+)"|--model (\S+)', block.text)
    (name,) = {one or other for one, other in names}
    return name


def each(has: Callable[[Block], bool], least: int) -> pytest.MarkDecorator:
    """All blocks of a kind; there must be that many when there are documents."""
    found = [block for block in BLOCKS if has(block)]
    assert not FOLDER or len(found) >= least, f"only {len(found)} of {least}: {found}"
    return pytest.mark.parametrize("block", found, ids=str)


def is_script(block: Block) -> bool:
    return "asyncio.run(" in block.text


def is_registration(block: Block) -> bool:
    return "register_llm(" in block.text


def is_lines(block: Block) -> bool:
    return block.language == "python" and not is_script(block) and not is_registration(block)


def is_frontend(block: Block) -> bool:
    return "-m dynamo.frontend" in block.text


def is_curl(block: Block) -> bool:
    return "curl " in block.text


def is_engine(block: Block) -> bool:
    return "-m dynamo.vllm" in block.text


KINDS = (is_script, is_registration, is_lines, is_frontend, is_curl, is_engine)


def test_every_block_is_of_one_kind() -> None:
    assert {block.path.name for block in BLOCKS} == set(FILES)
    assert [str(block) for block in BLOCKS if sum(kind(block) for kind in KINDS) != 1] == []


@each(is_script, 4)
def test_scripts_run_to_their_end(stage: Stage, block: Block) -> None:
    stage.mocker(BACKEND, model=model_of(block))
    ran = stage.script(block.text, through="kvflash.compat.dynamo")
    if "get_potential_loads" in block.text:
        tokens = re.findall(r"Generated tokens: (\[.*\])", ran.output)
        assert sum(len(json.loads(one)) for one in tokens) == 20
        assert re.search(r"Selected worker \d+ with \d+ prefill tokens", ran.output)
    else:
        assert re.search(r"Generated 20 tokens: \[(\d+, ){19}\d+\]", ran.output), ran.output


@pytest.mark.parametrize("name", FILES if FOLDER else ())
def test_lines_run_one_after_the_other(stage: Stage, name: str) -> None:
    """Later blocks see the results of earlier ones, as if a reader typed them in."""
    found = [block for block in BLOCKS if block.path.name == name and is_lines(block)]
    assert len(found) >= 1
    stage.mocker(BACKEND, model="model-name")
    stage.mocker("dynamo.VllmWorker.generate", model="model-name")

    async def check() -> None:
        async with DistributedRuntime.detached() as runtime:
            endpoint = runtime.endpoint(BACKEND)
            routers = [KvPushRouter(endpoint, 16, KvRouterConfig()) for _ in range(3)]
            names: dict[str, Any] = {
                "namespace": runtime.namespace,
                "tokens": TOKENS,
                "custom_cost_fn": lambda load: load["potential_decode_blocks"],
                **dict(zip(("router", "router_1", "router_2"), routers, strict=True)),
            }
            for block in found:
                names.pop("stream", None)
                names.pop("response", None)
                await run_lines(block, names)
                if "stream" in names:
                    assert len(items([item async for item in names["stream"]])) == 16
                if "response" in names:
                    assert len(items([item async for item in names["response"]])) == 16
                if block.text.startswith("client ="):
                    await check_client(names["client"])
                    names["client"] = endpoint.client()
            assert [router.totals()["requests"] for router in routers] == [0, 0, 0]
            for router in routers:
                await router.aclose()

    asyncio.run(asyncio.wait_for(check(), 60))


async def run_lines(block: Block, names: dict[str, Any]) -> None:
    """Run them; a deprecated call warns, and nothing else does."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        await run_fragment(block, names)
    assert all(one.category is DeprecationWarning for one in caught), caught
    is_deprecated = "best_worker_id(" in block.text
    assert bool([one for one in caught if "best_worker_id" in str(one.message)]) == is_deprecated


async def check_client(client: Any) -> None:
    """The document's description of a client: four ways to send requests."""
    first, second = sorted(await client.wait_for_instances(10))
    request = {"token_ids": TOKENS, "stop_conditions": {"max_tokens": 3}}
    asked = [await way(request) for way in (client.generate, client.random)]
    asked += [await client.round_robin(request) for _ in range(2)]
    asked.append(await client.direct(request, second))
    asked.append(await client.direct(input=request, component_id=first))
    for stream in asked:
        assert len(items([item async for item in stream])) == 3
    assert {stream.instance_id for stream in asked[2:4]} == {first, second}
    assert [stream.instance_id for stream in asked[4:]] == [second, first]


# Lines of a worker's own program before and after those of the document.
BEFORE = """\
import asyncio, json, sys
from dynamo.llm import ModelInput, ModelType, register_llm
from dynamo.runtime import DistributedRuntime

class Handler:
    def __init__(self, role):
        self.role = role

    async def generate(self, request):
        print(json.dumps({"event": "ready", "request": request}), flush=True)
        item = {"token_ids": [300], "finish_reason": "length"}
        if self.role == "prefill":
            item["disaggregated_params"] = {"from": "the prefill worker"}
        yield item

decode_handler, prefill_handler = Handler("decode"), Handler("prefill")

async def main():
    runtime = DistributedRuntime.detached()
    generate_endpoint = runtime.namespace("dynamo").component(sys.argv[1]).endpoint("generate")
    print(json.dumps({"event": "ready", "id": runtime.instance_id}), flush=True)
"""


def worker_program(lines: str, role: str) -> str:
    body = "".join("    " + line + "\n" for line in lines.splitlines())
    if "serve_endpoint(" not in lines:
        body += f"    await generate_endpoint.serve_endpoint({role}_handler.generate)\n"
    return BEFORE + body + "\nasyncio.run(main())\n"


@each(is_registration, 2)
def test_registered_workers_share_a_request(stage: Stage, block: Block) -> None:
    """Each half of the block in a process of its own, as its comments say."""
    at = block.text.index("# Prefill worker registration")
    http = stage.frontend("--tokenizer", str(TINY_LLAMA))
    halves: dict[str, Process] = {
        role: stage.serve(worker_program(lines, role), role, role, through="kvflash.compat.dynamo")
        for role, lines in (("decode", block.text[:at]), ("prefill", block.text[at:]))
    }
    ids = {role: process.ready()["id"] for role, process in halves.items()}
    stage.wait_workers(2)
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 7}
    name = model_of(block)
    status, body, headers = http.call("POST", "/v1/chat/completions", {**chat, "model": name})
    assert status == 200, body
    assert headers["x-kvflash-prefill-worker"] == f"{ids['prefill']}:0"
    assert headers["x-kvflash-worker"] == f"{ids['decode']}:0"
    prefill, decode = (halves[role].ready()["request"] for role in ("prefill", "decode"))
    assert prefill["stop_conditions"]["max_tokens"] == 1
    assert decode["stop_conditions"]["max_tokens"] == 7
    assert decode["token_ids"] == prefill["token_ids"]
    assert decode["prefill_result"] == {"disaggregated_params": {"from": "the prefill worker"}}


@each(is_frontend, 8)
def test_frontends_start_as_they_are_told(stage: Stage, block: Block) -> None:
    stage.mocker(BACKEND, model="m")
    ran = stage.console(stage.localized(block.text))
    assert ran
    for one in ran:
        http = Http(one.json[0]["url"].replace("0.0.0.0", "127.0.0.1"))
        stage.wait_workers(2, http)
        body = {"model": "m", "prompt": "Hello", "max_tokens": 3}
        assert http.post("/v1/completions", body)["usage"]["completion_tokens"] == 3
        wait_metric(http, 'kvflash_policy_info{policy="kv"')
        if "--router-replica-sync" in one.command:
            wait_metric(http, f"kvflash_sync_peers {len(ran) - 1}\n")
        http.close()


def wait_metric(http: Http, text: str) -> None:
    until(lambda: text in http.get("/metrics").decode(), text)


@each(is_engine, 2)
def test_an_engine_is_launched_and_asked(stage: Stage, block: Block) -> None:
    http = stage.frontend()
    (ran,) = stage.console(block.text)
    assert ran.json[0]["engine"] == "vllm"
    stage.wait_workers(1)
    body = {"model": ran.json[0]["model"], "prompt": "Hello", "max_tokens": 3}
    assert http.post("/v1/completions", body)["usage"]["completion_tokens"] == 3


@each(is_curl, 2)
def test_thresholds_are_set_asked_and_listed(stage: Stage, block: Block) -> None:
    model = "meta-llama/Llama-2-7b-hf"
    stage.mocker(BACKEND, model=model)
    http = stage.frontend()
    stage.wait_workers(2)
    if "-X POST" not in block.text:
        http.post("/busy_threshold", {"model": model, "active_decode_blocks_threshold": 0.85})
    answers = [ran.json for ran in stage.console(stage.localized(block.text))]
    promised = re.findall(r"^# Response: (.*)$", block.text, re.MULTILINE)
    assert len(answers) == len(promised) > 0
    for answer in answers:
        one = answer["thresholds"][0] if "thresholds" in answer else answer
        assert (one["model"], one["active_decode_blocks_threshold"]) == (model, 0.85)
        expected = 1000 if "-X POST" in block.text else None
        assert one["active_prefill_tokens_threshold"] == expected
        for text in promised:
            fields = set(re.findall(r'"(\w+)":', text)) - {"thresholds"}
            assert fields <= set(one)
