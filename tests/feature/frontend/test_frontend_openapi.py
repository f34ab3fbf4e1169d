"""GET /openapi.json of the frontend: complete, and what the frontend does.

The document is compared with the routes in the source, and schemathesis compares the side of the
operators with the answers of a real process. Answers to inference are the engines' own; refusals of
them are compared for each path. KVFLASH_SCHEMA_EXAMPLES asks for more cases than `make test` has
time for.
"""

from __future__ import annotations

import re

import pytest

from support_openapi import (
    EXAMPLES,
    SOURCES,
    check_answers,
    check_documented,
    check_methods,
    check_references,
    routes,
)

TABLE = (SOURCES / "gateway" / "api.rs").read_text(encoding="utf-8")
# The rows of that table are routed by a loop.
ROWS = re.findall(r'\b(?:row|by_load)\("(/[^"]+)"', TABLE)
UPLOADS = ("/v1/audio/transcriptions", "/v1/audio/translations")
# So are those of responses that workers keep.
KEPT: dict[str, set[str]] = {}
for verb, path in re.findall(r'\bof_response\(Method::(\w+), "(/[^"]+)"', TABLE):
    KEPT.setdefault(path, set()).add(verb.lower())
assert len(KEPT) == 2
ROUTES = {**routes("frontend"), **{path: {"post"} for path in ROWS}, **KEPT}


@pytest.fixture
def frontend(run):
    """A real process, with a worker that is not there."""
    flags = ("--port", "0", "--host", "127.0.0.1", "--log-level", "error")
    return run("kvflash.frontend", *flags, "--worker", "http://127.0.0.1:1,id=1")


def test_every_route_is_documented_and_every_documented_one_is_there(frontend, client):
    assert f"[Row; {len(ROWS)}]" in TABLE
    assert len(ROUTES) >= len(ROWS) + 12
    check_documented(client(frontend.ready()["url"]).get("/openapi.json"), ROUTES)


def test_documented_methods_are_taken_and_others_are_not(frontend, client):
    check_methods(client(frontend.ready()["url"]), ROUTES)


def test_every_reference_leads_somewhere(frontend, client):
    check_references(client(frontend.ready()["url"]).get("/openapi.json"))


@pytest.mark.parametrize(
    ("body", "headers", "wanted"),
    [
        (b'{"model": "m"}', {}, 503),
        (b"[]", {}, 400),
        (b"{}", {"content-encoding": "gzip"}, 415),
    ],
)
def test_refusals_of_inference_are_as_documented(frontend, client, body, headers, wanted):
    http = client(frontend.ready()["url"])
    document = http.get("/openapi.json")
    refused = 0
    for path in ROWS:
        if path in UPLOADS:
            continue
        reference = document["paths"][path]["post"]["responses"][str(wanted)]["$ref"]
        response = document["components"]["responses"][reference.rsplit("/", 1)[1]]
        schema = response["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
        required = document["components"]["schemas"][schema]["required"]
        status, answer, _ = http.call("POST", path, body, headers)
        assert status == wanted, (path, answer)
        assert set(answer) == set(required), path
        assert set(answer["error"]) >= {"type", "message"}
        refused += 1
    assert refused > 15


@pytest.mark.timeout(60 + 20 * EXAMPLES)
def test_answers_to_operators_are_as_documented(frontend, client, tmp_path):
    """No 5xx but the documented 503; statuses, types, shapes and refusals conform."""
    url = frontend.ready()["url"]
    flags = ("--exclude-tag", "inference", "--exclude-checks", "not_a_server_error")
    conformed = check_answers(url, tmp_path, "openapi_frontend_hooks", *flags)
    inference = {*ROWS, *KEPT}
    operations = sum(len(methods) for path, methods in ROUTES.items() if path not in inference)
    # The document itself is not among them.
    assert conformed.operations == operations - 1 > 12
    assert conformed.cases > 200
    assert not re.search(r"panicked|Traceback", "".join(frontend.errors))
    assert client(url).call("GET", "/live")[0] == 200
