"""GET /openapi.json of the router: complete, and what the router does.

The document is compared with the routes in the source, and schemathesis compares it with the
answers of a real process. KVFLASH_SCHEMA_EXAMPLES asks for more of its cases than `make test` has
time for.
"""

from __future__ import annotations

import re

import jsonschema_rs
import pytest

from support_openapi import (
    EXAMPLES,
    check_answers,
    check_documented,
    check_methods,
    check_references,
    routes,
)

ROUTES = routes("router")
FLAGS = ("--port", "0", "--host", "127.0.0.1", "--log-level", "error")


@pytest.fixture
def router(run):
    """A real process's address."""
    return run("kvflash.router", *FLAGS)


def test_every_route_is_documented_and_every_documented_one_is_there(router, client):
    assert len(ROUTES) >= 17
    check_documented(client(router.ready()["url"]).get("/openapi.json"), ROUTES)


def test_documented_methods_are_taken_and_others_are_not(router, client):
    check_methods(client(router.ready()["url"]), ROUTES)


def test_every_reference_leads_somewhere(router, client):
    check_references(client(router.ready()["url"]).get("/openapi.json"))


@pytest.mark.parametrize("policy", ["auto", "kv", "least-loaded"])
def test_explanations_are_as_documented_where_a_worker_is_passed_over(run, client, policy):
    http = client(run("kvflash.router", *FLAGS, "--router-mode", policy).ready()["url"])
    for worker_id, state in ((1, "active"), (2, "draining")):
        body = {"worker_id": worker_id, "model_name": "m", "block_size": 4, "state": state}
        http.post("/workers", body, expect=201)
    document = http.get("/openapi.json")
    judge = jsonschema_rs.validator_for({**document, "$ref": "#/components/schemas/Explanation"})
    answer = http.post("/explain", {"model_name": "m", "token_ids": [1, 2, 3, 4]})
    assert [one["is_draining"] for one in answer["candidates"]] == [False, True]
    judge.validate(answer)


@pytest.mark.timeout(60 + 20 * EXAMPLES)
def test_answers_are_as_documented(router, client, tmp_path):
    """No 5xx but the documented 503; statuses, types, shapes and refusals conform."""
    url = router.ready()["url"]
    http = client(url)
    for worker_id in (1, 2):
        body = {"worker_id": worker_id, "model_name": "m", "block_size": 4, "dp_size": 2}
        http.post("/workers", body, expect=201)
    flags = ("--exclude-checks", "not_a_server_error")
    conformed = check_answers(url, tmp_path, "openapi_router_hooks", *flags)
    operations = sum(len(methods) for methods in ROUTES.values())
    # The document itself is not among them.
    assert conformed.operations == operations - 1 > 15
    assert conformed.cases > 300
    assert not re.search(r"panicked|Traceback", "".join(router.errors))
    # A case may have removed the workers.
    body = {"worker_id": 2**62 + 1, "model_name": "after", "block_size": 4}
    http.post("/workers", body, expect=201)
    assert http.get("/health")["status"] == "ok"
