"""deploy/kubernetes is consistent: accepted flags; matching ports, names, probes and times."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from kvflash._core import Frontend
from kvflash.frontend.app import make_frontend
from kvflash.frontend.args import FrontendArgs, parse_args
from kvflash.roster.dns_spec import DnsWorkers
from service import Http

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
MANUAL = (ROOT / "docs/kubernetes.md").read_text(encoding="utf-8")
ENGINE = "dns+http://vllm:8000,events=tcp://*:5557,replay=tcp://*:5657"


def manifests() -> list[dict[str, Any]]:
    files = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    assert len(files) == 2
    return [one for path in files for one in yaml.safe_load_all(path.read_text(encoding="utf-8"))]


def manifest(kind: str, name: str) -> dict[str, Any]:
    (found,) = [m for m in manifests() if (m["kind"], m["metadata"]["name"]) == (kind, name)]
    return found


def pod(kind: str, name: str) -> dict[str, Any]:
    return dict(manifest(kind, name)["spec"]["template"]["spec"])


def container(kind: str, name: str) -> dict[str, Any]:
    (found,) = pod(kind, name)["containers"]
    return dict(found)


PODS = [("StatefulSet", "vllm"), ("Deployment", "kvflash")]


def frontend_args() -> FrontendArgs:
    module, *flags = container("Deployment", "kvflash")["args"]
    assert module == "kvflash.frontend"
    return parse_args(flags)


@pytest.fixture(scope="module")
def frontend() -> Iterator[Http]:
    """A frontend with the Deployment's flags that knows nothing of its engines yet."""
    core: Frontend = make_frontend(frontend_args())[0]
    http = Http(f"http://127.0.0.1:{core.start('127.0.0.1', 0)}")
    yield http
    http.close()
    core.stop()


def test_there_is_something_to_look_at() -> None:
    assert [one["kind"] for one in manifests()] == [
        *("Service", "Deployment", "PodDisruptionBudget"),
        *("Service", "StatefulSet"),
    ]
    names = [(one["kind"], one["metadata"]["name"]) for one in manifests()]
    assert len(set(names)) == len(names)


def test_the_frontend_is_told_the_engines_own_name_and_ports() -> None:
    (worker,) = frontend_args().workers
    found = DnsWorkers.parse(worker)
    service = manifest("Service", "vllm")
    assert (found.name, worker) == (service["metadata"]["name"], ENGINE)
    assert service["spec"]["clusterIP"] == "None"
    ports = {port["name"]: port["port"] for port in service["spec"]["ports"]}
    http, *more = worker.removeprefix("dns+").split(",")
    assert urlsplit(http).port == ports["http"]
    assert {k: urlsplit(v).port for k, v in (one.split("=") for one in more)} == {
        name: ports[name] for name in ("events", "replay")
    }


def test_the_engine_publishes_where_it_is_listened_for() -> None:
    engine = container("StatefulSet", "vllm")
    ports = {port["name"]: port["containerPort"] for port in engine["ports"]}
    args = engine["args"]
    config = json.loads(args[args.index("--kv-events-config") + 1])
    assert config == {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{ports['events']}",
        "replay_endpoint": f"tcp://*:{ports['replay']}",
    }
    assert f"--port={ports['http']}" in args
    # vLLM reads VLLM_PORT, which Kubernetes may set.
    assert pod("StatefulSet", "vllm")["enableServiceLinks"] is False


@pytest.mark.parametrize(("kind", "name"), PODS)
def test_selectors_and_ports_agree(kind: str, name: str) -> None:
    service, workload = manifest("Service", name)["spec"], manifest(kind, name)["spec"]
    labels = workload["template"]["metadata"]["labels"]
    assert workload["selector"]["matchLabels"].items() <= labels.items()
    assert service["selector"].items() <= labels.items()
    opened = {port["name"]: port["containerPort"] for port in container(kind, name)["ports"]}
    assert {port["targetPort"] for port in service["ports"]} == set(opened)
    if service.get("clusterIP") == "None":
        # No proxy in between: the port of a Service is the engine's.
        assert {port["name"]: port["port"] for port in service["ports"]} == opened
    if kind == "StatefulSet":
        assert workload["serviceName"] == name
    else:
        assert frontend_args().port == opened["http"]
        budget = manifest("PodDisruptionBudget", name)["spec"]
        assert budget["selector"] == workload["selector"]
        assert budget["minAvailable"] < workload["replicas"]
        (spread,) = pod(kind, name)["topologySpreadConstraints"]
        assert spread["labelSelector"] == workload["selector"]


@pytest.mark.parametrize(("kind", "name"), PODS)
def test_no_rights_and_limits_for_all(kind: str, name: str) -> None:
    assert pod(kind, name)["automountServiceAccountToken"] is False
    resources = container(kind, name)["resources"]
    assert set(resources["requests"]) == {"cpu", "memory"}
    assert "memory" in resources["limits"]


def test_volumes_that_are_mounted_exist() -> None:
    spec = manifest("StatefulSet", "vllm")["spec"]
    claims = {claim["metadata"]["name"] for claim in spec["volumeClaimTemplates"]}
    volumes = {one["name"] for one in spec["template"]["spec"]["volumes"]} | claims
    mounted = {one["name"] for one in container("StatefulSet", "vllm")["volumeMounts"]}
    assert mounted == volumes


@pytest.mark.parametrize(("kind", "name"), PODS)
def test_running_requests_have_the_time_that_they_are_promised(kind: str, name: str) -> None:
    word, pause_s = container(kind, name)["lifecycle"]["preStop"]["exec"]["command"]
    assert word == "sleep"
    grace_s = pod(kind, name)["terminationGracePeriodSeconds"]
    drain_s = frontend_args().drain_timeout if kind == "Deployment" else 0
    assert int(pause_s) + drain_s + 10 <= grace_s
    if kind == "StatefulSet":
        # Until the last frontend has looked again, and what is cached on the way has run out.
        assert int(pause_s) > frontend_args().worker_dns_interval_secs + 30


def test_probes_ask_for_paths_that_there_are(frontend: Http) -> None:
    ports = {port["name"] for port in container("Deployment", "kvflash")["ports"]}
    probes = {
        kind: container("Deployment", "kvflash")[f"{kind}Probe"]["httpGet"]
        for kind in ("readiness", "liveness")
    }
    assert {probe["port"] for probe in probes.values()} <= ports
    # Without an engine it is alive, and not ready.
    assert frontend.call("GET", probes["liveness"]["path"])[0] == 200
    status, said, _ = frontend.call("GET", probes["readiness"]["path"])
    assert (status, said["ready"]) == (503, False)
    assert frontend.call("GET", "/no-such-path")[0] == 404
    engine = container("StatefulSet", "vllm")
    paths = {engine[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness")}
    assert paths == {"/health"}, "where frontends look for an engine's health, too"


def test_the_index_fits_into_the_container() -> None:
    limit = container("Deployment", "kvflash")["resources"]["limits"]["memory"]
    assert limit.endswith("Gi")
    args = frontend_args()
    assert args.index_memory + args.tokenizer_cache < int(limit.removesuffix("Gi")) * 2**30


def test_the_image_is_made_of_what_there_is() -> None:
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    stages = [line for line in lines if line.startswith("FROM ")]
    assert [line.split()[1].rsplit("-", 1)[1] for line in stages] == ["bookworm"] * 2
    copied = [
        source
        for line in lines
        if line.startswith("COPY ") and "--from" not in line
        for source in line.split()[1:-1]
    ]
    assert len(copied) >= 7
    assert [source for source in copied if not (ROOT / source).exists()] == []
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    assert {line[1:] for line in ignored if line.startswith("!")} == set(copied)
    build = re.search(r"^requires = (\[.*\])$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert build is not None
    assert f'"{json.loads(build[1])[0]}"' in text
    (user,) = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert user.isdecimal(), "Kubernetes can't tell whether a name is root"
    assert pod("Deployment", "kvflash")["securityContext"]["runAsNonRoot"] is True
    (entry,) = [line.removeprefix("ENTRYPOINT ") for line in lines if "ENTRYPOINT" in line]
    assert json.loads(entry) == ["python", "-m"]
    assert f"EXPOSE {frontend_args().port}" in lines


def test_the_manual_names_files_that_exist_and_says_what_they_say() -> None:
    links = re.findall(r"\]\(https://[\w./]+/main/(deploy/[\w/.]+)\)", MANUAL)
    applied = re.findall(r"(?:-f|dockerfile:) (deploy/[\w/]+(?:\.yaml)?)", MANUAL)
    assert len(links) == 3
    assert len(applied) == 4
    assert all((ROOT / path).is_file() for path in links + applied)
    grace_s = pod("Deployment", "kvflash")["terminationGracePeriodSeconds"]
    assert f"`terminationGracePeriodSeconds: {grace_s}`" in MANUAL
    assert f"`--drain-timeout` {frontend_args().drain_timeout:.0f} s" in MANUAL
    pause_s = container("StatefulSet", "vllm")["lifecycle"]["preStop"]["exec"]["command"][1]
    assert f"`preStop: sleep {pause_s}`" in MANUAL
    probe = container("StatefulSet", "vllm")["readinessProbe"]
    assert f"{probe['periodSeconds'] * probe['failureThreshold']} s of failures" in MANUAL


def test_the_tutorial_runs_the_doctor_where_the_frontend_runs() -> None:
    tutorial = (ROOT / "docs/start/kubernetes.md").read_text(encoding="utf-8")
    ((name, url),) = re.findall(r"kubectl exec deployment/(\S+) -- kvflash doctor (\S+)", tutorial)
    assert urlsplit(url).port == frontend_args().port
    assert container("Deployment", name)["args"][0] == "kvflash.frontend"
    # Nowhere else: a port-forward opens neither the engines' HTTP ports nor their replay sockets.
    assert tutorial.count("kvflash doctor") == 1


def test_docker_compose_of_the_manual() -> None:
    block = re.search(r"```yaml\n(.*?)```", MANUAL, re.DOTALL)
    assert block is not None
    services = yaml.safe_load(block[1])["services"]
    module, *flags = shlex.split(services["kvflash"]["command"])
    assert module == "kvflash.frontend"
    (worker,) = parse_args(flags).workers
    assert worker == ENGINE
    assert DnsWorkers.parse(worker).name in services
    words = shlex.split(services["vllm"]["command"])
    args = container("StatefulSet", "vllm")["args"]
    assert json.loads(words[-1]) == json.loads(args[args.index("--kv-events-config") + 1])
