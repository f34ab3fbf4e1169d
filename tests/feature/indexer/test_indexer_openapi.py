"""GET /openapi.json: complete, and what the indexer does.

The document is compared with the routes in the source, and schemathesis compares it with the
answers of a real process. KVFLASH_SCHEMA_EXAMPLES asks for more of its cases than `make test` has
time for (`make fuzz`).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from service import ROOT, SUPPORT, Engine

SOURCES = ROOT / "rust" / "serve" / "src" / "indexer"
EXAMPLES = int(os.environ.get("KVFLASH_SCHEMA_EXAMPLES", "12"))


def routes() -> dict[str, set[str]]:
    """Paths and their methods, as the source routes them."""
    text = "".join(path.read_text(encoding="utf-8") for path in SOURCES.glob("*.rs"))
    found: dict[str, set[str]] = {}
    # What only tests switch on is nobody's API.
    text = text.replace('.route("/test/', "")
    for path, rest in re.findall(r"\.route\(\s*\"([^\"]+)\",\s*((?:\.?\w+\([^.]*?)+)", text):
        found.setdefault(path, set()).update(re.findall(r"\b(get|post|put|delete)\(", rest))
    return found


@pytest.fixture
def indexer(run):
    """A real process's address."""
    flags = ("--port", "0", "--host", "127.0.0.1", "--log-level", "error")
    return run("kvflash.indexer", *flags)


def test_every_route_is_documented_and_every_documented_one_is_there(indexer, client):
    document = client(indexer.ready()["url"]).get("/openapi.json")
    documented = {path: set(methods) for path, methods in document["paths"].items()}
    routed = routes()
    assert len(routed) >= 14
    assert all(routed.values()), routed
    assert documented == routed


def test_documented_methods_are_taken_and_others_are_not(indexer, client):
    http = client(indexer.ready()["url"])
    for path, methods in http.get("/openapi.json")["paths"].items():
        if path in routes():
            for method in ("GET", "POST", "PUT", "DELETE", "PATCH"):
                status, _, headers = http.call(method, path)
                assert (status != 405) == (method.lower() in methods), (method, path, status)
                if status == 405:
                    assert set(methods) <= set(headers["allow"].lower().split(","))


def test_every_reference_leads_somewhere(indexer, client):
    http = client(indexer.ready()["url"])
    document = http.get("/openapi.json")
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


@pytest.mark.timeout(60 + 10 * EXAMPLES)
def test_answers_are_as_documented(indexer, client, tmp_path):
    """No 5xx; statuses, types, shapes and refusals conform, for bodies good and bad."""
    url = indexer.ready()["url"]
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json"),
        *("--max-examples", str(EXAMPLES), "--seed", "1", "--generation-deterministic"),
        *("--checks", "all", "--warnings", "off", "--continue-on-failure"),
    ]
    env = {**os.environ, "SCHEMATHESIS_HOOKS": "openapi_hooks", "PYTHONPATH": str(SUPPORT)}
    done = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
    tested = re.search(r"Tested: (\d+)", done.stdout)
    cases = re.search(r"(\d[\d,]*) generated", done.stdout)
    assert tested, done.stdout
    assert cases, done.stdout
    # The document itself is not among them.
    assert int(tested[1]) == len(routes()) - 1 > 5, done.stdout
    assert int(cases[1].replace(",", "")) > 200
    assert not re.search(r"panicked|Traceback", "".join(indexer.errors))
    # Its transport has come through as well.
    engine = Engine(replay=False)
    try:
        body = {"instance_id": 2**62 + 1, "model_name": "after", "block_size": 4}
        client(url).post("/register", {**body, "endpoint": engine.endpoint}, expect=201)
        engine.wait_for_subscriber()
    finally:
        engine.close()
