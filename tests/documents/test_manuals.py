"""Every code block of the manuals, run as printed; what can't be run here says why.

A block is named by its file and the beginning of its first line. The free ports of the test stand
for the printed ones; placeholders of a manual are filled in where a test names them.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import settings_tables
from support_manuals import ROOT, Manuals
from support_markdown import Block
from support_stage import TINY_LLAMA, Stage, items, run_fragment

from dns_server import DnsServer
from kvflash import (
    DistributedRuntime,
    ModelInput,
    ModelType,
    WorkerMetricsPublisher,
    register_llm,
)
from kvflash.discovery import Put
from kvflash.frontend.args import parse_args as frontend_args
from kvflash.router import parse_args as router_args
from kvflash.version import IS_RELEASED

PAGES = (
    "README.md",
    *(
        f"docs/{name}.md"
        for name in (
            "command",
            "routing",
            "runtime",
            "publishing",
            "frontend",
            "disaggregation",
            "engines",
            "policies",
            "mocker",
        )
    ),
)
# The README's first commands: in a checkout, or from PyPI.
INSTALLS = settings_tables.INSTALL[IS_RELEASED].partition("    ")[2].splitlines()[0]

NOT_RUN = {
    ("README.md", INSTALLS): "needs a network; test_the_readme_installs reads it",
    ("command.md", "kvflash frontend"): "the README's commands, which are run",
    ("command.md", "WORKER  URL"): "a table; test_looking.py compares one",
    ("command.md", "120 requests in"): "a report; test_replay.py compares one",
    ("command.md", "kvflash workers drain"): "test_looking.py drains and resumes",
    ("routing.md", "cost = queue"): "a formula",
    ("routing.md", "cost = overlap_score_weight"): "a formula",
    (
        "policies.md",
        "kvflash frontend",
    ): "test_routing_policies.py, test_fairness.py have it",
    ("policies.md", "make policies"): "rust/sim/tests play the same rows in smaller fleets",
    ("routing.md", "Formula for worker_id="): "a log line",
    ("routing.md", "Formula for worker_1:"): "a log line",
    ("engines.md", "export NATS_SERVER"): "a real engine; test_launchers.py relays to a real NATS",
    (
        "publishing.md",
        "publisher.publish_stored(tokens[:32]",
    ): "test_publisher.py publishes items and asks for them",
    ("publishing.md", "make capi"): "built and linked by test_capi.py",
    ("publishing.md", "kvflash_publisher_options"): "C; test_capi.py runs the same calls",
}
MANUALS = Manuals(PAGES, NOT_RUN)
find, runs = MANUALS.find, MANUALS.runs

CHAT = {"model": "mock-model", "max_tokens": 4, "messages": [{"role": "user", "content": "Hello"}]}


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVFLASH_WORKER", raising=False)


def test_every_block_is_run_or_says_why_not() -> None:
    MANUALS.check()


@runs(("policies.md", "from kvflash import Policy"))
def test_a_policy_of_your_own_in_python(stage: Stage, blocks: list[Block]) -> None:
    ran = stage.script(blocks[0].text)
    assert ran.output == "report 3 highest_score\nquestion 1 highest_score\n"


@pytest.mark.parametrize("is_released", [False, True])
def test_the_readme_installs(is_released: bool) -> None:
    """Commands that can't run without a network must at least name existing things."""
    text = (ROOT / "README.md").read_text()
    assert settings_tables.installing(text) == text, "make settings"
    shown = settings_tables.installing(text, is_released)
    assert ("pip install kvflash\n" in shown) == is_released
    assert ". .venv/bin/activate" in shown
    assert "VENV ?= .venv\n" in (ROOT / "Makefile").read_text()


def test_only_a_release_is_installed_by_its_name() -> None:
    """Before the first release the name on PyPI could be anybody's package."""
    examples = [path for path in (ROOT / "examples").glob("*") if path.is_file()]
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *examples]
    sources = [*(ROOT / "python").rglob("*.py"), *(ROOT / "rust").rglob("*.rs")]
    assert len(pages) > 25
    assert len(sources) > 300
    named = re.compile(r"pip install ['\"]?kvflash")
    found = {p.name for p in [*pages, *sources] if named.search(p.read_text(encoding="utf-8"))}
    assert found <= ({"README.md", "version.py"} if IS_RELEASED else {"version.py"})


# -- README, the mocker and the HTTP API of the frontend


@runs(
    ("README.md", "kvflash mocker"),
    ("README.md", "kvflash frontend \\"),
    ("README.md", "echo"),
    ("README.md", "kvflash workers"),
    ("routing.md", "curl -s localhost:8000/busy_threshold"),
    ("frontend.md", "curl -s localhost:8000/workers"),
)
def test_the_first_request_of_the_readme(stage: Stage, blocks: list[Block]) -> None:
    engines, frontend, ask, explain, thresholds, workers = [stage.localized(b.text) for b in blocks]
    (two,), (one,) = stage.console(engines), stage.console(frontend)
    assert (len(two.json), len(one.json)) == (2, 1)
    stage.wait_workers(2)
    (_, first), (_, again) = stage.console(ask), stage.console(ask)
    for answer in (first, again):
        head, _, body = answer.output.replace("\r", "").partition("\n\n")
        assert head.startswith("HTTP/1.1 200") and "x-kvflash-worker: " in head
        assert json.loads(body)["usage"]["completion_tokens"] == 8
    worker = [line for line in first.output.splitlines() if line.startswith("x-kvflash-worker")]
    assert worker and worker[0] in again.output, "the second one does not go where the first went"
    assert "x-kvflash-overlap-blocks: 0" not in again.output

    listed, why = stage.console(explain)
    assert listed.output.count(" healthy ") == 2, listed.output
    assert re.search(r"^\*  [12]:0 ", why.output, re.MULTILINE), why.output
    assert "QUEUE  PREFILL  DECODE" in why.output, why.output
    assert "\n0 tokens are expected" not in why.output, "the prompt is the one that was sent"
    (asked,) = [line for line in again.output.splitlines() if line.startswith("x-request-id")]
    (past,) = stage.console(f"kvflash explain localhost:{stage.port(8000)} {asked.split()[1]}")
    assert "outcome: complete" in past.output

    before, after = stage.console(thresholds)
    assert before.json["thresholds"] == []
    assert after.json["active_decode_blocks_threshold"] == 0.85

    third = ("--port", str(stage.port(8102)), "--zmq-events-port", str(stage.port(5559)))
    stage.start("kvflash.mocker", "--block-size", "16", *third)
    added, drained, gone = stage.console(workers)
    assert (added.json["id"], gone.json) == (3, {"status": "ok", "id": 3})
    assert drained.json["state"] == "draining"


@runs(("README.md", "CUDA_VISIBLE_DEVICES=0 kvflash vllm"))
def test_two_vllm_servers_that_are_launched(stage: Stage, blocks: list[Block]) -> None:
    one, other, frontend = stage.console(stage.localized(blocks[0].text))
    assert [ran.json[0]["engine"] for ran in (one, other)] == ["vllm", "vllm"]
    assert frontend.json[0]["service"] == "frontend"
    stage.wait_workers(2)
    model = one.json[0]["model"]
    answer = stage.http().post("/v1/chat/completions", {**CHAT, "model": model})
    assert answer["usage"]["completion_tokens"] == 4


@runs(("README.md", "vllm serve Qwen"))
def test_two_vllm_servers_by_address(stage: Stage, blocks: list[Block]) -> None:
    # The double's model is not in a local Hub cache.
    named = {"--tokenizer Qwen/Qwen3-0.6B": f"--tokenizer {TINY_LLAMA}"}
    assert len(stage.console(stage.localized(blocks[0].text, named))) == 3
    stage.wait_workers(2)
    body = {**CHAT, "model": "fake"}
    assert stage.http().post("/v1/chat/completions", body)["usage"]["completion_tokens"] == 4


@runs(("mocker.md", "kvflash mocker --num-workers"), ("mocker.md", '{"event": "ready"'))
def test_a_mocker_says_where_it_is(stage: Stage, blocks: list[Block]) -> None:
    (started,) = stage.console(stage.localized(blocks[0].text))
    assert started.json[0] == json.loads(stage.localized(blocks[1].text))


@runs(("mocker.md", "kvflash mocker --endpoint"))
def test_a_mocker_serves_an_endpoint(stage: Stage, blocks: list[Block]) -> None:
    stage.console(stage.localized(blocks[0].text, {"FOLDER": str(TINY_LLAMA)}))
    http = stage.frontend()
    stage.wait_workers(4)
    answer = http.post("/v1/chat/completions", CHAT)
    assert answer["usage"]["completion_tokens"] == 4


@runs(("frontend.md", "kvflash frontend --worker 'dns+http"))
def test_engines_found_by_dns(stage: Stage, blocks: list[Block]) -> None:
    """The name server is the test's own."""
    (worker,) = stage.start(
        "kvflash.mocker", "--host", "127.0.0.6", "--port", "0", "--zmq-events-port", "auto",
        "--zmq-replay-port", "auto",
    )  # fmt: skip
    filled = {
        "vllm:8000": f"vllm.test:{urlsplit(worker['url']).port}",
        "*:5557": f"*:{urlsplit(worker['events']).port}",
        "*:5657": f"*:{urlsplit(worker['replay']).port}",
    }
    with DnsServer() as server:
        server.names["vllm.test"] = ["127.0.0.6"]
        stage.env["KVFLASH_WORKER_DNS_SERVER"] = server.address
        stage.console(stage.localized(blocks[0].text, filled))
        stage.wait_workers(1)
    (found,) = stage.http().get("/workers")
    assert (found["url"], len(found["listeners"])) == (worker["url"], 1)


@runs(("frontend.md", "kvflash frontend --worker http://host:8000,events"))
def test_a_frontend_with_a_tokenizer(stage: Stage, blocks: list[Block]) -> None:
    (worker,) = stage.start(
        "kvflash.mocker", "--port", "0", "--zmq-events-port", "auto", "--zmq-replay-port", "auto",
        "--tokenizer", str(TINY_LLAMA),
    )  # fmt: skip
    filled = {
        "http://host:8000": worker["url"],
        "tcp://host:5557": worker["events"],
        "tcp://host:5657": worker["replay"],
        "FOLDER": str(TINY_LLAMA),
    }
    stage.console(stage.localized(blocks[0].text, filled))
    stage.wait_workers(1)
    assert stage.http().post("/v1/chat/completions", CHAT)["usage"]["completion_tokens"] == 4


@runs(("frontend.md", "kvflash frontend --worker http://host:8000 --model-alias"))
def test_aliases(stage: Stage, blocks: list[Block]) -> None:
    names = ("Qwen3-32B", "Qwen3-32B-fp8")
    (one,), (other,) = (
        stage.start("kvflash.mocker", "--port", "0", "--model-name", name) for name in names
    )
    single, split = blocks[0].text.splitlines()
    stage.console(stage.localized(single, {"http://host:8000": one["url"]}))
    stage.wait_workers(1)
    asked = {**CHAT, "model": "gpt-4o"}
    assert stage.http().post("/v1/chat/completions", asked)["model"] == names[0]
    stage.env["KVFLASH_PORT"] = str(stage.port(8001))
    filled = {"http://a:8000": one["url"], "http://b:8000": other["url"]}
    stage.console(stage.localized(split, filled))
    second = stage.http(8001)
    stage.wait_workers(2, second)
    assert second.post("/v1/chat/completions", asked)["model"] in names


@runs(("frontend.md", "kvflash frontend --worker http://a:8000 http://b:8000 --tokenizer"))
def test_a_tokenizer_for_each_model(stage: Stage, blocks: list[Block]) -> None:
    names = ("org/chat", "org/code")
    (chat,), (code,) = (
        stage.start(
            "kvflash.mocker", "--port", "0", "--model-name", name, "--tokenizer", str(TINY_LLAMA)
        )
        for name in names
    )
    filled = {
        "http://a:8000": chat["url"],
        "http://b:8000": code["url"],
        "/models/chat": str(TINY_LLAMA),
        "/models/code": str(TINY_LLAMA),
    }
    stage.console(stage.localized(blocks[0].text, filled))
    stage.wait_workers(2)
    for name in names:
        answer = stage.http().post("/v1/chat/completions", {**CHAT, "model": name})
        assert answer["usage"]["completion_tokens"] == 4


# -- the runtime


@runs(("runtime.md", "import asyncio"), ("runtime.md", "runtime = DistributedRuntime"))
def test_a_worker_and_its_client(
    stage: Stage, blocks: list[Block], capsys: pytest.CaptureFixture[str]
) -> None:
    stage.serve(blocks[0].text, "worker")

    async def check() -> None:
        names: dict[str, Any] = {"DistributedRuntime": DistributedRuntime}
        await run_fragment(blocks[1], names)
        await names["runtime"].close()

    asyncio.run(check())
    printed = [json.loads(line.replace("'", '"')) for line in capsys.readouterr().out.splitlines()]
    assert printed == [
        *({"token_ids": [n]} for n in range(3)),
        {"token_ids": [], "finish_reason": "length"},
    ]


@runs(("runtime.md", "kvflash frontend --reasoning-parser"))
def test_a_frontend_that_parses_answers(stage: Stage, blocks: list[Block]) -> None:
    (frontend,) = stage.console(stage.localized(blocks[0].text))
    assert frontend.json[0]["service"] == "frontend"


@runs(("routing.md", "{"))
def test_settings_in_a_file(blocks: list[Block], tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    path.write_text(blocks[0].text)
    for parse in (frontend_args, router_args):
        args = parse(["--router-policy-config", str(path)])
        assert (args.router_mode, args.router_temperature) == ("kv", 0.1)
        assert args.router_session_affinity_ttl_secs == 600 and args.track_output_blocks
        assert (args.active_decode_blocks_threshold, args.router_queue_threshold) == (0.9, None)
        assert list(args.shadow_policies) == ["least-request"]


@runs(("command.md", "port: 8000"), ("command.md", "port = 8000"))
def test_every_flag_in_a_file(blocks: list[Block], tmp_path: Path) -> None:
    for block in blocks:
        path = tmp_path / f"kvflash.{block.language}"
        path.write_text(block.text)
        args = frontend_args(["--config", str(path)])
        assert (args.port, args.tokenizer, args.router_mode) == (8000, ["/models/llama"], "kv")
        assert args.workers == [
            f"http://engine-{n}:8000,events=tcp://engine-{n}:5557" for n in (1, 2)
        ]
        assert args.fairness_weight == [("alice", 2.0), ("bob", 0.5)]


@runs(("command.md", "kvflash replay"), ("command.md", '{"at": 0.0'))
def test_a_trace_is_replayed(stage: Stage, blocks: list[Block]) -> None:
    command, trace = blocks
    stage.mocker("dynamo.backend.generate", model="mock-model")
    stage.frontend("--tokenizer", str(TINY_LLAMA))
    stage.wait_workers(2)
    (stage.folder / "trace.jsonl").write_text(trace.text)
    (ran,) = stage.console(stage.localized(command.text))
    assert ran.output.startswith("4 requests in ") and ", 0 failed" in ran.output
    assert "% of the prompt tokens were cached, as reported for 4 requests" in ran.output


@runs(("routing.md", "import asyncio"))
def test_a_router_in_ones_own_process(stage: Stage, blocks: list[Block]) -> None:
    stage.mocker("dynamo.backend.generate", model="m")
    ran = stage.script(blocks[0].text)
    got = [eval(line) for line in ran.output.splitlines()]  # The script prints its items.
    assert len(items(got)) == 20 and got[-1]["finish_reason"] == "length"


@asynccontextmanager
async def runtimes(count: int) -> AsyncIterator[list[DistributedRuntime]]:
    made = [DistributedRuntime.detached() for _ in range(count)]
    try:
        yield made
    finally:
        for runtime in made:
            await runtime.close()


@runs(
    ("publishing.md", "from kvflash.publisher"),
    ("publishing.md", "relay = KvEventPublisher(component"),
    ("publishing.md", "metrics = WorkerMetricsPublisher()"),
)
def test_what_an_engine_publishes(stage: Stage, blocks: list[Block]) -> None:
    async def check() -> None:
        async with runtimes(2) as (runtime, other):
            component = runtime.namespace("dynamo").component("backend")
            names: dict[str, Any] = {
                "component": component,
                "tokens": list(range(32)),
                "more": list(range(16)),
                "WorkerMetricsPublisher": WorkerMetricsPublisher,
            }
            await run_fragment(blocks[0], names)
            assert names["publisher"].stats()["events_total"] == 4
            await run_fragment(blocks[2], names)
            client = (
                other.namespace("dynamo").component("backend").endpoint("load_metrics").client()
            )
            await client.wait_for_instances(10)
            stream = await client.random({})
            load = await anext(stream)
            assert load == {"dp_rank": 0, "active_decode_blocks": 120, "kv_total_blocks": 4096}
            await stream.aclose()
        async with runtimes(1) as (runtime,):
            names["component"] = runtime.namespace("dynamo").component("backend")
            await run_fragment(blocks[1], names)
            prefix = f"v1/events/dynamo/backend/{runtime.instance_id}/"
            async with runtime.discovery.watch(prefix) as watch:
                events = (event async for event in watch if isinstance(event, Put))
                where = json.loads((await anext(events)).value)
            assert where["endpoint"] == "tcp://10.0.0.7:5557"

    asyncio.run(asyncio.wait_for(check(), 60))


# -- disaggregation and engines


@runs(("disaggregation.md", "await register_llm"))
def test_prefill_and_decode_workers_of_the_runtime(stage: Stage, blocks: list[Block]) -> None:
    http = stage.frontend("--tokenizer", str(TINY_LLAMA))
    seen: list[dict[str, Any]] = []

    async def prefill(request: dict[str, Any]) -> Any:
        yield {"token_ids": [5], "finish_reason": "length", "disaggregated_params": {"from": "p"}}

    async def decode(request: dict[str, Any]) -> Any:
        seen.append(request)
        yield {"token_ids": [5], "finish_reason": "length"}

    def ask() -> dict[str, str]:
        stage.wait_workers(2)
        status, body, headers = http.call("POST", "/v1/chat/completions", {**CHAT, "model": "m"})
        assert status == 200, body
        return headers

    async def check() -> None:
        async with runtimes(2) as (first, second):
            names = {
                "decode_endpoint": first.endpoint("dynamo.decode.generate"),
                "prefill_endpoint": second.endpoint("dynamo.prefill.generate"),
                "ModelInput": ModelInput,
                "ModelType": ModelType,
                "register_llm": register_llm,
            }
            await run_fragment(blocks[0], names)
            loop = asyncio.get_running_loop()
            serving = [
                loop.create_task(names["decode_endpoint"].serve_endpoint(decode)),
                loop.create_task(names["prefill_endpoint"].serve_endpoint(prefill)),
            ]
            headers = await asyncio.to_thread(ask)
            assert headers["x-kvflash-prefill-worker"] == f"{second.instance_id}:0"
            assert headers["x-kvflash-worker"] == f"{first.instance_id}:0"
            assert seen[0]["prefill_result"] == {"disaggregated_params": {"from": "p"}}
        await asyncio.gather(*serving, return_exceptions=True)

    asyncio.run(asyncio.wait_for(check(), 90))


@runs(("disaggregation.md", "kvflash frontend --prefill-worker"))
def test_prefill_and_decode_engines(stage: Stage, blocks: list[Block]) -> None:
    filled: dict[str, str] = {}
    for role, host in (("prefill", "p1"), ("decode", "d1")):
        (worker,) = stage.start(
            "kvflash.mocker", "--port", "0", "--zmq-events-port", "auto", f"--is-{role}-worker"
        )
        filled[f"http://{host}:8000"] = worker["url"]
        filled[f"tcp://{host}:5557"] = worker["events"]
    stage.console(stage.localized(blocks[0].text, filled))
    stage.wait_workers(2)
    http = stage.http()
    assert http.post("/v1/chat/completions", CHAT)["usage"]["completion_tokens"] == 4
    assert b'kvflash_prefills_total{outcome="handed_off"} 1\n' in http.get("/metrics")


@runs(("engines.md", "kvflash vllm"))
def test_engines_that_are_launched(stage: Stage, blocks: list[Block]) -> None:
    """With doubles where the engines would be found; the frontend finds and asks them."""
    http = stage.frontend()
    launched = stage.console(stage.localized(blocks[0].text))
    assert [one.json[0]["engine"] for one in launched] == ["vllm", "sglang"]
    stage.wait_workers(2)
    ids = {one.json[0]["instance_id"] for one in launched}
    assert {worker["id"] for worker in http.get("/workers")} == ids
    answer = http.post("/v1/chat/completions", {**CHAT, "model": "fake"})
    assert answer["usage"]["completion_tokens"] == 4
