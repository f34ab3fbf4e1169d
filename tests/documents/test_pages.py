"""Code blocks of tutorials, how-tos and the cookbook, run as printed; see test_manuals.py."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from support_manuals import ROOT, Manuals
from support_markdown import Block
from support_stage import TINY_LLAMA, Stage

from kvflash.frontend.args import parse_args as frontend_args
from kvflash.mocker.args import parse_args as mocker_args

FOLDERS = ("start", "use", "operate", "cookbook", "reference", "moving")
NOT_RUN = {
    ("kubernetes.md", "docker build"): "docker; test_deploy_kubernetes.py compares the manifests",
    ("kubernetes.md", "kubectl apply -f deploy/kubernetes/vllm"): "a cluster",
    ("kubernetes.md", "kubectl apply -f deploy/kubernetes/kvflash"): "a cluster",
    ("kubernetes.md", "kubectl port-forward"): "a cluster",
    ("kubernetes.md", "kubectl exec"): "a cluster; test_deploy_kubernetes.py compares the names",
    ("sizing.md", "memory ="): "a formula",
    ("sizing.md", "cores ="): "a formula",
    ("monitoring.md", "rate("): "a query for Prometheus; test_queries_name_metrics reads them all",
    ("open-webui.md", "docker run"): "docker",
    ("dynamo.md", "python -m"): "test_compat_dynamo.py runs scripts",
    ("sglang.md", "sglang-router:"): "two command lines; test_moving.py reads the flags",
    ("vllm-router.md", "vllm-router"): "two command lines; test_moving.py reads the flags",
    ("aibrix.md", "AIBRIX_ROUTING_ALGORITHM"): "test_moving.py parses the policies; a name in DNS",
}
PAGES = [
    path.relative_to(ROOT).as_posix()
    for folder in FOLDERS
    for path in sorted((ROOT / "docs" / folder).glob("*.md"))
    if path.name != "index.md"
]
MANUALS = Manuals(PAGES, NOT_RUN)
runs = MANUALS.runs


def test_every_block_is_run_or_says_why_not() -> None:
    assert len(PAGES) >= 22
    MANUALS.check()


def running(stage: Stage, *flags: str) -> None:
    """Two mock engines behind a frontend at the port that stands for 8000."""
    lines = stage.start(
        "kvflash.mocker", "--port", "0", "--num-workers", "2", "--speedup-ratio", "1000",
        workers=2,
    )  # fmt: skip
    workers = [word for line in lines for word in ("--worker", line["url"])]
    stage.frontend("--discovery", "none", *workers, *flags)
    stage.wait_workers(2)


# -- tutorials


@runs(
    ("laptop.md", "kvflash mocker"),
    ("laptop.md", "kvflash frontend"),
    ("laptop.md", "kvflash workers"),
    ("laptop.md", "echo"),
    ("laptop.md", "kvflash explain"),
)
def test_the_tutorial_for_a_laptop(stage: Stage, blocks: list[Block]) -> None:
    engines, frontend, workers, ask, explain = [stage.localized(b.text) for b in blocks]
    stage.console(engines)
    stage.console(frontend)
    stage.wait_workers(2)
    (listed,) = stage.console(workers)
    assert listed.output.count(" healthy ") == 2

    def answer() -> tuple[str, int, int]:
        _, ran = stage.console(ask)
        head, _, body = ran.output.replace("\r", "").partition("\n\n")
        headers = dict(line.split(": ", 1) for line in head.splitlines()[1:])
        usage = json.loads(body)["usage"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return headers["x-kvflash-worker"], int(headers["x-kvflash-overlap-blocks"]), cached

    first, again = answer(), answer()
    assert first[1:] == (0, 0), "the caches are empty"
    assert again[0] == first[0]
    assert again[1] > 0 < again[2]
    (why,) = stage.console(explain)
    assert "\n0 tokens are expected" not in why.output
    assert re.search(r"^\*  [12]:0 ", why.output, re.MULTILINE), why.output


@runs(
    ("two-vllm-servers.md", "CUDA_VISIBLE_DEVICES=0"),
    ("two-vllm-servers.md", "CUDA_VISIBLE_DEVICES=1"),
    ("two-vllm-servers.md", "kvflash frontend"),
    ("two-vllm-servers.md", "kvflash doctor"),
    ("two-vllm-servers.md", "echo"),
)
def test_the_tutorial_for_two_servers(stage: Stage, blocks: list[Block]) -> None:
    """The engine's double serves the model ``fake``, with the tokens of words."""
    name = "Qwen/Qwen3-0.6B"
    one, other, frontend, doctor, ask = [stage.localized(b.text) for b in blocks]
    stage.console(one)
    stage.console(other)
    stage.console(frontend.replace(f"--tokenizer {name}", "--tokenize-timeout 9"))
    stage.wait_workers(2)
    (findings,) = stage.console(doctor)
    assert "FAIL" not in findings.output
    _, first, again, why = stage.console(ask.replace(name, "fake"))
    assert not first.json["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert again.json["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert re.search(r"^\*  [12]:0 ", why.output, re.MULTILINE), why.output


# -- how-tos


@runs(("clients.md", "from openai"), ("clients.md", "from anthropic"))
def test_official_clients(stage: Stage, blocks: list[Block]) -> None:
    running(stage)
    openai, anthropic = [stage.script(stage.localized(block.text)) for block in blocks]
    assert openai.output.strip() == "0"
    assert anthropic.output.strip() == "8"


@runs(
    ("sessions.md", "kvflash frontend"),
    ("sessions.md", "curl"),
    ("priorities.md", "curl"),
    ("structured-output.md", "curl"),
)
def test_requests_with_what_clients_may_say(stage: Stage, blocks: list[Block]) -> None:
    frontend, session, priority, schema = [stage.localized(b.text) for b in blocks]
    lines = stage.start("kvflash.mocker", "--port", "0", "--num-workers", "2", workers=2)
    filled = {
        f"http://{n}:{stage.port(8000)}": one["url"] for n, one in zip("ab", lines, strict=True)
    }
    stage.console(stage.localized(frontend, filled))
    stage.wait_workers(2)
    for text in (session, session, priority, schema):
        (ran,) = stage.console(text)
        assert ran.json["usage"]["completion_tokens"] >= 4
    status, metrics, _ = stage.http().call("GET", "/metrics")
    assert status == 200
    assert b'session_affinity_requests_total{outcome="kept"} 1' in metrics


@runs(("high-availability.md", "kvflash frontend"))
def test_two_frontends_find_each_other(stage: Stage, blocks: list[Block]) -> None:
    stage.mocker("dynamo.backend.generate", model="mock-model")
    del stage.env["KVFLASH_PORT"]
    tokenized = blocks[0].text.replace("--port", f"--tokenizer {TINY_LLAMA} --port")
    assert len(stage.console(stage.localized(tokenized))) == 2
    for port in (8000, 8001):
        stage.wait_workers(2, stage.http(port))


def test_queries_name_metrics() -> None:
    page = (ROOT / "docs" / "operate" / "monitoring.md").read_text(encoding="utf-8")
    manual = (ROOT / "docs" / "frontend.md").read_text(encoding="utf-8")
    named = set(re.findall(r"kvflash_[a-z_]+", page))
    assert len(named) >= 8
    assert {name for name in named if name not in manual} == set()


def test_every_cause_of_a_failed_attempt_is_listed() -> None:
    source = ROOT / "rust" / "serve" / "src"
    plane = (source / "frontend/runtime/plane.rs").read_text(encoding="utf-8")
    labels = plane.partition("pub fn label(")[2].partition("\n    }\n")[0]
    causes = set(re.findall(r'=> "([a-z_]+)"', labels))
    assert len(causes) >= 10
    for path in (*(source / "gateway").rglob("*.rs"), source / "frontend/proxy.rs"):
        text = path.read_text(encoding="utf-8")
        causes.update(re.findall(r'(?:Failed::new\(\s*|cause: )"([a-z_]+)"', text))
    manual = (ROOT / "docs" / "frontend.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^\| `kvflash_attempts_failed_total.*$", manual, re.MULTILINE)
    listed = set(re.findall(r"`([a-z_]+)`", row))
    # Not counted: no attempt at all, a refusal that every worker would repeat, and a test's own.
    assert listed == causes - {"none", "response_gone", "test"}


# -- cookbook


@runs(("nginx.md", "upstream kvflash"))
def test_nginx_takes_the_configuration(blocks: list[Block], tmp_path: Path) -> None:
    program = shutil.which("nginx")
    if program is None:
        pytest.skip("nginx is not installed")
    # The certificate is the reader's.
    text = re.sub(r" *ssl_certificate.*\n", "", blocks[0].text).replace("443 ssl", "8443")
    (tmp_path / "nginx.conf").write_text(
        f"pid {tmp_path}/pid;\nerror_log stderr;\nevents {{}}\nhttp {{\naccess_log off;\n{text}}}\n"
    )
    command = [program, "-t", "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


@runs(("litellm.md", "model_list:"))
def test_litellm_is_given_one_address(blocks: list[Block]) -> None:
    config = yaml.safe_load(blocks[0].text)
    (model,) = config["model_list"]
    assert urlsplit(model["litellm_params"]["api_base"])[1:3] == ("kvflash:8000", "/v1")
    # Without a key of its own LiteLLM does not start.
    assert config["general_settings"]["master_key"].startswith("os.environ/")


@runs(("systemd.md", "[Unit]"), ("systemd.md", "port: 8000"))
def test_a_unit_and_its_file(blocks: list[Block], tmp_path: Path) -> None:
    unit, config = blocks
    (command,) = re.findall(r"^ExecStart=(.*)$", unit.text, re.MULTILINE)
    path = tmp_path / "kvflash.yaml"
    path.write_text(config.text)
    words = shlex.split(command.replace("/etc/kvflash.yaml", str(path)))
    assert words[0].endswith("/kvflash")
    args = frontend_args(words[2:])
    assert (len(args.workers), args.port, args.log_format) == (2, 8000, "json")
    assert args.index_memory == 1 << 30
    (stop_s,) = map(int, re.findall(r"^TimeoutStopSec=(\d+)$", unit.text, re.MULTILINE))
    assert stop_s > args.lame_duck_timeout + args.drain_timeout


@runs(("compose.md", "services:"))
def test_flags_of_the_compose_file(blocks: list[Block]) -> None:
    services = yaml.safe_load(blocks[0].text)["services"]
    parsers: dict[str, Callable[[list[str]], Any]] = {
        "engine": mocker_args, "kvflash": frontend_args
    }  # fmt: skip
    args = {}
    for name, parse in parsers.items():
        module, *flags = shlex.split(services[name]["command"])
        assert module == {"engine": "kvflash.mocker", "kvflash": "kvflash.frontend"}[name]
        assert (ROOT / services[name]["build"]["dockerfile"]).is_file()
        args[name] = parse(flags)
    assert args["kvflash"].workers == [
        "dns+http://engine:8000,events=tcp://*:5557,replay=tcp://*:5657"
    ]
    engine, *_ = args["engine"]
    assert (engine.port, engine.block_size) == (8000, 16)
