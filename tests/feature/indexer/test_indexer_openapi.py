"""GET /openapi.json: complete, and what the indexer does.

The document is compared with the routes in the source, and schemathesis compares it with the
answers of a real process. KVFLASH_SCHEMA_EXAMPLES asks for more of its cases than `make test` has
time for (`make fuzz`).
"""

from __future__ import annotations

import re

import pytest

from service import Engine
from support_openapi import (
    EXAMPLES,
    check_answers,
    check_documented,
    check_methods,
    check_references,
    routes,
)

ROUTES = routes("indexer")


@pytest.fixture
def indexer(run):
    """A real process's address."""
    flags = ("--port", "0", "--host", "127.0.0.1", "--log-level", "error")
    return run("kvflash.indexer", *flags)


def test_every_route_is_documented_and_every_documented_one_is_there(indexer, client):
    assert len(ROUTES) >= 14
    check_documented(client(indexer.ready()["url"]).get("/openapi.json"), ROUTES)


def test_documented_methods_are_taken_and_others_are_not(indexer, client):
    check_methods(client(indexer.ready()["url"]), ROUTES)


def test_every_reference_leads_somewhere(indexer, client):
    check_references(client(indexer.ready()["url"]).get("/openapi.json"))


@pytest.mark.timeout(60 + 10 * EXAMPLES)
def test_answers_are_as_documented(indexer, client, tmp_path):
    """No 5xx; statuses, types, shapes and refusals conform, for bodies good and bad."""
    url = indexer.ready()["url"]
    conformed = check_answers(url, tmp_path, "openapi_hooks")
    # The document itself is not among them.
    assert conformed.operations == len(ROUTES) - 1 > 5
    assert conformed.cases > 200
    assert not re.search(r"panicked|Traceback", "".join(indexer.errors))
    # Its transport has come through as well.
    engine = Engine(replay=False)
    try:
        body = {"instance_id": 2**62 + 1, "model_name": "after", "block_size": 4}
        client(url).post("/register", {**body, "endpoint": engine.endpoint}, expect=201)
        engine.wait_for_subscriber()
    finally:
        engine.close()
