"""Fixtures: an indexer in this process, and engines that feed it."""

from __future__ import annotations

import re

import pytest

from kvflash.publisher import KvEventPublisher
from service import EmbeddedIndexer, Engine
from support_publisher import SIZE


@pytest.fixture(scope="module")
def embedded():
    made = EmbeddedIndexer()
    yield made
    made.close()


@pytest.fixture
def http(embedded):
    """The module's indexer, emptied of registrations after each test."""
    yield embedded.http
    for worker in embedded.http.get("/workers"):
        body = {"instance_id": worker["instance_id"], "model_name": worker["model_name"]}
        embedded.http.post("/unregister", body)


@pytest.fixture
def engine():
    """Makes engines that end with the test."""
    engines = []

    def make(**settings):
        engines.append(Engine(**settings))
        return engines[-1]

    yield make
    for made in engines:
        made.close()


@pytest.fixture
def model(request):
    """A model name of the test's own: an index outlives its workers."""
    return re.sub(r"\W+", "-", request.node.name)


@pytest.fixture
def publisher():
    """Makes publishers that end with the test."""
    made = []

    def make(component=None, **settings):
        settings.setdefault("kv_block_size", SIZE)
        made.append(KvEventPublisher(component, **settings))
        return made[-1]

    yield make
    for each in made:
        each.shutdown()
