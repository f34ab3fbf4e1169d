"""Scripts with Dynamo's names, run by ``python -m kvflash.compat.dynamo``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support_stage import Stage

from kvflash import ConfigError, InvalidArgumentError, command
from kvflash.compat.dynamo.classes import KvRouterConfig
from kvflash.compat.dynamo.flags import translate
from kvflash.compat.dynamo.modules import MODULES
from kvflash.compat.dynamo.run import main
from kvflash.discovery.opening import discovery_kind
from kvflash.mocker.args import parse_args as parse_mocker
from kvflash.runtime.settings import plane_name
from service import until
from support_found import join

ROOT = Path(__file__).parents[2]
BLOCK = 16
THROUGH = "kvflash.compat.dynamo"

SCRIPT = """\
import asyncio, json, sys
from collections.abc import Mapping
from dynamo._core import DistributedRuntime as Same
from dynamo.llm import KvIndexer, KvPushRouter, KvRouterConfig
from dynamo.runtime import DistributedRuntime, dynamo_worker

TOKENS = list(range(1, 65))

@dynamo_worker(static=False)
async def program(runtime, words):
    assert Same is DistributedRuntime and type(runtime) is DistributedRuntime
    component = runtime.namespace("dynamo").component("backend")
    client = await component.endpoint("generate").client()
    first, second = sorted(await client.wait_for_instances())
    request = {"token_ids": TOKENS, "stop_conditions": {"max_tokens": 2}}
    stream = await client.direct(input=request, component_id=second)
    count = len([item async for item in stream])
    assert stream.instance_id == second and count > 0
    for wrong in ({"input": request}, {"request": request, "input": request, "component_id": 1}):
        try:
            await client.direct(**wrong)
        except ValueError as error:
            print(json.dumps({"refused": str(error)}))
    index = KvIndexer(component, 16)
    found = await index.find_matches_for_request(TOKENS, 0)
    assert isinstance(found, Mapping) and found == found.scores and index.block_size() == 16
    assert await index.find_matches_for_request([1, 2]) == {}
    await index.aclose()
    print(json.dumps({"words": words, "found": found[second], "others": len(found) - 1}))

asyncio.run(program(sys.argv[1:]))
"""


def test_a_script_runs_with_names_of_arguments_and_results(stage: Stage) -> None:
    stage.mocker("dynamo.backend.generate", model="m")
    ran = stage.script(SCRIPT, through=THROUGH)
    *refused, last = map(json.loads, ran.output.splitlines())
    assert last == {"words": [], "found": 4, "others": 0}
    assert [one["refused"] for one in refused] == [
        "direct() takes one argument instance_id (or its alias component_id), which is missing",
        "direct() takes one argument request (or its alias input), which is given twice",
    ]


def test_the_formula_of_the_documents_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their example: prefill 8, 5 and 2 blocks, decode 10, 5 and 9, so cost 18, 10 and 11."""
    for name in ("KVFLASH_ROUTING_ALGORITHM", "ROUTING_ALGORITHM"):
        monkeypatch.delenv(name, raising=False)
    core = KvRouterConfig(use_kv_events=False).make_core(BLOCK)
    join(core, (1, 2, 3))
    prompt = list(range(10 * BLOCK))
    for worker, cached, active in ((1, 2, 10), (2, 5, 5), (3, 8, 9)):
        core.reserve(prompt[: cached * BLOCK], f"cached-{worker}", {"worker_id": worker})
        core.free(f"cached-{worker}")
        other = [1_000 * worker + at for at in range(active * BLOCK)]
        core.reserve(other, f"active-{worker}", {"worker_id": worker})
        core.mark_prefill_complete(f"active-{worker}")
    chosen = [core.query(prompt) for _ in range(20)]
    assert {(worker, overlap) for worker, _, overlap, _ in chosen} == {(2, 5)}
    assert KvRouterConfig().make_core(BLOCK).policy == "kv"
    assert KvRouterConfig(router_mode="random").make_core(BLOCK).policy == "random"
    monkeypatch.setenv("KVFLASH_ROUTING_ALGORITHM", "least-request")
    assert KvRouterConfig().make_core(BLOCK).policy == "least-request"


def test_a_command_runs_under_its_other_name(stage: Stage) -> None:
    (ready,) = stage.console(
        f"python -m dynamo.frontend --router-mode kv --host 127.0.0.1 --port {stage.port(8001)}"
    )
    assert ready.json[0]["service"] == "frontend"
    http = stage.http(8001)
    assert until(lambda: http.get("/v1/models"), "the models")["data"] == []


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A process's environment of its own."""
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("KVFLASH_", "DYN_"))}
    monkeypatch.setattr(os, "environ", kept)
    return kept


@pytest.mark.parametrize(
    ("command", "given", "wanted"),
    [
        ("indexer", "--port 1", "--metrics-prefix dynamo --port 1"),
        ("router", "--endpoint a.b.c --namespace a --enforce-disagg", "--endpoint a.b.c"),
        ("frontend", "--router-mode kv --model-name m", "--router-mode kv --model-name m"),
        ("frontend", "--static-endpoint a.b.c", "--namespace a --router-mode round-robin"),
        (
            "frontend",
            "--port 1 --static-endpoint a.b.c --router-mode random --model-name m --model-path p",
            "--namespace a --router-mode random --port 1",
        ),
        (
            "mocker",
            "--num-workers 2 --zmq-kv-events-ports 5557,5558 --zmq-replay-ports 6557,6558",
            "--num-workers 2 --zmq-events-port 5557 --zmq-replay-port 6557",
        ),
        (
            "mocker",
            "--num-workers 2 --data-parallel-size 2 --zmq-kv-events-ports 5557,5559",
            "--num-workers 2 --data-parallel-size 2 --zmq-events-port 5557",
        ),
        ("mocker", "--durable-kv-events --endpoint a.b.c", "--endpoint a.b.c --event-plane nats"),
        ("mocker", "--planner-profile-data profile.npz --port 1", "--port 1"),
        ("vllm", "--store-kv etcd", "--store-kv etcd"),
    ],
)
@pytest.mark.usefixtures("environment")
def test_flags_of_commands_are_translated(command: str, given: str, wanted: str) -> None:
    assert translate(command, given.split()) == wanted.split()


@pytest.mark.parametrize("command", ["router", "mocker"])
def test_flags_for_discovery_and_requests_are_variables_here(
    command: str, environment: dict[str, str]
) -> None:
    environment.update(DYN_STORE_KV="etcd", KVFLASH_REQUEST_PLANE="tcp")
    words = ["--store-kv", "file", "--request-plane", "http", "--port", "1"]
    assert translate(command, words) == ["--port", "1"]
    assert (discovery_kind(), plane_name()) == ("file", "http")


@pytest.mark.parametrize(
    ("command", "given", "wanted"),
    [
        ("frontend", "--static-endpoint a.b", "--static-endpoint must be namespace.component"),
        ("frontend", "--static-endpoint a.b.c --router-mode kv", "excludes --router-mode kv"),
        ("mocker", "--zmq-kv-events-ports x", "must be ports, separated by commas, got 'x'"),
        ("mocker", "--zmq-kv-events-ports 1,2", "one port for each of 1 workers"),
        ("mocker", "--num-workers 2 --zmq-replay-ports 5,7", "must be ports 1 apart"),
        ("mocker", "--extra-engine-args /none", "must be a JSON file; /none: "),
        ("router", "--store-kv zookeeper", "invalid choice: 'zookeeper'"),
    ],
)
@pytest.mark.usefixtures("environment")
def test_flags_that_can_not_be_followed_say_why(
    command: str, given: str, wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["-m", f"dynamo.{command}", *given.split()]) == 2
    assert wanted in capsys.readouterr().err


def test_variables_outrank_the_names_of_metrics_and_modes(environment: dict[str, str]) -> None:
    environment["DYN_METRICS_PREFIX"] = "mine"
    assert translate("indexer", []) == []
    environment["DYN_ROUTER_MODE"] = "kv"
    with pytest.raises(ConfigError, match="excludes --router-mode kv"):
        translate("frontend", ["--static-endpoint", "a.b.c"])


def test_a_file_of_engine_settings_outranks_the_mockers_flags(tmp_path: Path) -> None:
    path = tmp_path / "args.json"
    settings = {
        "num_gpu_blocks": 100, "block_size": 16, "dp_size": 2, "speedup_ratio": 10.0,
        "enable_prefix_caching": False, "is_prefill": True, "is_decode": False,
        "startup_time": None,
    }  # fmt: skip
    path.write_text(json.dumps(settings))
    words = ["--num-gpu-blocks", "7", "--endpoint", "a.b.c", "--extra-engine-args", str(path)]
    config, _ = parse_mocker(translate("mocker", words))
    assert (config.num_gpu_blocks, config.block_size, config.data_parallel_size) == (100, 16, 2)
    assert (config.speedup_ratio, config.role) == (10.0, "prefill")
    assert not config.enable_prefix_caching


def test_newer_names_are_there() -> None:
    names = MODULES["dynamo.llm"]
    assert names["KvRouter"] is names["KvPushRouter"]
    config = names["RouterConfig"](names["RouterMode"].Random, names["KvRouterConfig"]())
    assert config.make_core(BLOCK).policy == "random"
    assert names["RouterConfig"](overlap_score_weight=2.0).make_core(BLOCK).policy == "kv"
    assert names["RouterConfigOverride"](router_temperature=0.5) == {"router_temperature": 0.5}
    with pytest.raises(InvalidArgumentError, match="unknown setting 'shared_cache_multiplier'"):
        names["RouterConfigOverride"](shared_cache_multiplier=1.0)


@pytest.mark.parametrize(
    ("name", "given", "wanted"),
    [
        ("frontend", {}, (None, "1")),
        ("router", {"NATS_SERVER": "nats://n"}, ("nats", "1")),
        ("mocker", {"NATS_SERVER": "nats://n"}, ("nats", None)),
        ("frontend", {"NATS_SERVER": "n", "KVFLASH_EVENT_PLANE": "zmq"}, ("zmq", "1")),
        ("frontend", {"NATS_SERVER": "n", "DYN_EVENT_PLANE": "zmq"}, (None, "1")),
        ("frontend", {"KVFLASH_LOG_DECISIONS": "0"}, (None, "0")),
    ],
)
def test_commands_have_dynamos_defaults_until_something_else_is_chosen(
    name: str,
    given: dict[str, str],
    wanted: tuple[str | None, str | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("KVFLASH_EVENT_PLANE", "KVFLASH_LOG_DECISIONS")
    environment = {key: text for key, text in os.environ.items() if key in ("PATH", "HOME")}
    monkeypatch.setattr(os, "environ", environment | given)
    seen = []
    monkeypatch.setattr(
        command, "main", lambda words: seen.append((words, [*map(os.environ.get, names)])) or 0
    )
    assert main(["-m", f"dynamo.{name}", "--port", "1"]) == 0
    assert seen == [([name, "--port", "1"], list(wanted))]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["-m", "dynamo.planner"], "-m takes one of dynamo.frontend, "),
        (["-m"], "got nothing"),
        (["no-such-script.py"], "SCRIPT must be a Python file, and no-such-script.py is not there"),
    ],
)
def test_what_is_not_there_is_said(
    words: list[str], wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert wanted in capsys.readouterr().err


def test_a_name_that_is_not_offered_is_an_import_error(stage: Stage) -> None:
    path = stage.folder / "script.py"
    path.write_text("from dynamo.llm import EntrypointArgs\n")
    ran = subprocess.run(
        [sys.executable, "-m", THROUGH, str(path)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 1
    assert "cannot import name 'EntrypointArgs' from 'dynamo.llm'" in ran.stderr


def test_no_package_of_that_name_is_installed() -> None:
    """A wheel with a top-level ``dynamo`` would overwrite another project's."""
    assert {path.name for path in (ROOT / "python").iterdir()} - {"__pycache__"} == {"kvflash"}
    for wheel in (ROOT / "dist").glob("*.whl"):
        assert not [n for n in zipfile.ZipFile(wheel).namelist() if n.startswith("dynamo")]


def test_the_core_has_the_names_of_both() -> None:
    llm, runtime, core = (MODULES[f"dynamo.{name}"] for name in ("llm", "runtime", "_core"))
    assert set(core) == set(llm) | set(runtime)
    assert len(llm) > 15
    assert len(runtime) >= 7
