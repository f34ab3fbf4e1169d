"""GET /openapi.json of the router: complete, and what the router does.

The document is compared with the routes in the source, and schemathesis compares it with the
answers of a real process. KVFLASH_SCHEMA_EXAMPLES asks for more of its cases than `make test` has
time for.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from service import ROOT, SUPPORT

SOURCES = ROOT / "rust" / "serve" / "src" / "router"
EXAMPLES = int(os.environ.get("KVFLASH_SCHEMA_EXAMPLES", "12"))


def routes() -> dict[str, set[str]]:
    """Paths and their methods, as the source routes them."""
    text = "".join(path.read_text(encoding="utf-8") for path in SOURCES.glob("*.rs"))
    found: dict[str, set[str]] = {}
    for part in text.split(".route(")[1:]:
        path, rest = part.split(",", 1)
        rest = rest.split(".fallback(")[0]
        methods = re.findall(r"\b(get|post|put|patch|delete)\(", rest)
        found.setdefault(path.strip().strip('"'), set()).update(methods)
    return found


@pytest.fixture
def router(run):
    """A real process's address."""
    flags = ("--port", "0", "--host", "127.0.0.1", "--log-level", "error")
    return run("kvflash.router", *flags)


def test_every_route_is_documented_and_every_documented_one_is_there(router, client):
    document = client(router.ready()["url"]).get("/openapi.json")
    documented = {path: set(methods) for path, methods in document["paths"].items()}
    routed = routes()
    assert len(routed) >= 17
    assert all(routed.values()), routed
    assert documented == routed


def test_documented_methods_are_taken_and_others_are_not(router, client):
    http = client(router.ready()["url"])
    for path, methods in http.get("/openapi.json")["paths"].items():
        for method in ("GET", "POST", "PUT", "DELETE", "PATCH"):
            status, _, headers = http.call(method, path.replace("{", "").replace("}", ""))
            assert (status != 405) == (method.lower() in methods), (method, path, status)
            if status == 405:
                assert set(methods) <= set(headers["allow"].lower().split(","))


def test_every_reference_leads_somewhere(router, client):
    document = client(router.ready()["url"]).get("/openapi.json")
    references = re.findall(r"'\$ref': '#/([^']+)'", str(document))
    assert len(references) > 40
    for reference in references:
        place = document
        for part in reference.split("/"):
            place = place[part]
    names = {
        f"components/{kind}/{n}" for kind, all_ in document["components"].items() for n in all_
    }
    assert names == set(references), "what nothing refers to is not needed"


@pytest.mark.timeout(60 + 20 * EXAMPLES)
def test_answers_are_as_documented(router, client, tmp_path):
    """No 5xx but the documented 503; statuses, types, shapes and refusals conform."""
    url = router.ready()["url"]
    http = client(url)
    for worker_id in (1, 2):
        body = {"worker_id": worker_id, "model_name": "m", "block_size": 4, "dp_size": 2}
        http.post("/workers", body, expect=201)
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json"),
        *("--max-examples", str(EXAMPLES), "--seed", "1", "--generation-deterministic"),
        *("--checks", "all", "--exclude-checks", "not_a_server_error"),
        *("--warnings", "off", "--continue-on-failure"),
    ]
    env = {**os.environ, "SCHEMATHESIS_HOOKS": "openapi_router_hooks", "PYTHONPATH": str(SUPPORT)}
    done = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
    tested = re.search(r"Tested: (\d+)", done.stdout)
    cases = re.search(r"(\d[\d,]*) generated", done.stdout)
    assert tested, done.stdout
    assert cases, done.stdout
    operations = sum(len(methods) for methods in routes().values())
    # The document itself is not among them.
    assert int(tested[1]) == operations - 1 > 15, done.stdout
    assert int(cases[1].replace(",", "")) > 300
    assert not re.search(r"panicked|Traceback", "".join(router.errors))
    assert http.get("/health")["status"] == "ok"
