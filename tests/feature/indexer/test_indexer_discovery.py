"""The indexer's workers from discovery, and how routers find the indexer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from kvflash import ConfigError
from kvflash.discovery import open_discovery
from kvflash.indexer import IndexerService
from kvflash.roster.indexers import PREFIX, IndexerFinder
from service import stored, until
from support_indexer import IDS, SIZE, publish, query

LOCAL = {"host": "127.0.0.1", "port": 0, "threads": 1}
CARD = {"model_name": "m", "kv_cache_block_size": SIZE}
INSTANCE = {"transport": {"kind": "nats", "subject": "tests.backend"}}


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("KVFLASH_DISCOVERY_DIR", str(tmp_path / "discovery"))


@pytest.fixture
def service():
    """Makes services that end with the test."""
    made = []

    def make(**settings: Any) -> IndexerService:
        made.append(IndexerService(**LOCAL, **settings).start())
        return made[-1]

    yield make
    for one in made:
        one.stop()


def tell(values: dict[str, dict[str, Any] | None]) -> None:
    """Set keys of discovery; None takes them back."""

    async def work() -> None:
        discovery = open_discovery("file")
        for key, value in values.items():
            if value is None:
                await discovery.delete(key)
            else:
                await discovery.put(key, json.dumps(value).encode())
        await discovery.close()

    asyncio.run(asyncio.wait_for(work(), 60))


def keys(number: int, endpoint: str, namespace: str = "tests") -> dict[str, dict[str, Any] | None]:
    path = f"{namespace}/backend/generate/{number}"
    return {
        f"v1/events/{namespace}/backend/{number}/0": {"endpoint": endpoint},
        f"v1/models/{path}": CARD,
        f"v1/instances/{path}": INSTANCE,
    }


def test_an_indexer_that_refuses_all_workers_warns_once(service, caplog) -> None:
    for number in (7, 8):
        nameless = {f"v1/models/tests/backend/generate/{number}": {}}
        tell(keys(number, "tcp://127.0.0.1:1") | nameless)
    service(discovery="file")
    until(lambda: "this service refused all" in caplog.text, "the warning")
    assert caplog.text.count("this service refused all") == 1


def test_workers_of_discovery_are_followed(service, client, engine):
    engines = [engine(replay=False), engine(replay=False)]
    http = client(service(discovery="file", namespace="tests").url)
    mine, other = keys(7, engines[0].endpoint), keys(8, engines[1].endpoint, "others")
    tell({**other, **mine})
    engines[0].wait_for_subscriber()
    publish(http, engines[0], stored([1], IDS[:SIZE], block_size=SIZE), instance=7)
    assert query(http, "m", IDS[:SIZE])["scores"] == {"7": {"0": SIZE}}
    tell(dict.fromkeys(mine))
    until(lambda: not http.get("/workers"), "it to be forgotten")
    tell(mine)
    until(lambda: [one["instance_id"] for one in http.get("/workers")] == [7], "it to be back")


def test_engines_of_flags_are_followed(service, client, engine):
    made = engine(replay=False)
    flags = (f"http://127.0.0.1:1,events={made.endpoint}", "http://127.0.0.1:2,id=9")
    http = client(service(engines=flags, model_name="m", block_size=SIZE).url)
    made.wait_for_subscriber()
    publish(http, made, stored([1], IDS[:SIZE], block_size=SIZE), instance=1)
    assert query(http, "m", IDS[:SIZE])["scores"] == {"1": {"0": SIZE}}
    with pytest.raises(ConfigError, match="--worker 'http://h:1,id=x'"):
        IndexerService(**LOCAL, engines=("http://h:1,id=x",))
    with pytest.raises(ConfigError, match="--tenant-id must not be empty"):
        IndexerService(**LOCAL, tenant_id="")


def test_an_indexer_waits_for_registrations_at_its_own_path(service, caplog):
    caplog.set_level("INFO", "kvflash.roster.finder")
    service(discovery="file")
    assert "in discovery 'file' or POST /register" in caplog.text


@pytest.fixture
def find():
    """Follows the indexers of a namespace; the reported URLs, the last one last."""
    made = []

    def make(namespace: str | None) -> Callable[[], list[str | None]]:
        told: list[str | None] = [None]

        def show(url: str | None) -> None:
            if url == "nonsense":
                raise ConfigError("must be http://host:port")
            told.append(url)

        made.append(IndexerFinder("file", namespace, show))
        made[-1].start()
        return lambda: told

    yield make
    for one in made:
        one.stop()


def test_an_indexer_is_found_after_one_that_is_refused(service, find, caplog):
    told = find("tests")

    async def announce() -> None:
        discovery = open_discovery("file")
        await discovery.put(f"{PREFIX}0", b'{"url": "nonsense"}')
        await discovery.close()

    asyncio.run(announce())
    until(lambda: "can't be used: must be http" in caplog.text, "the refusal")
    good = service(discovery="file")
    until(lambda: told()[-1] == good.url, "the good one beside it")


def test_an_indexer_is_found_as_long_as_it_is_there(service, find):
    mine, all_of_them, others = find("tests"), find(None), find("others")
    first = service(discovery="file", namespace="tests")
    until(lambda: mine()[-1] == first.url, "the indexer of the namespace")
    second = service(discovery="file")
    until(lambda: others()[-1] == second.url, "the one of all namespaces")
    until(lambda: all_of_them()[-1] == second.url, "it, for a router of all")
    assert mine() == [None, first.url]
    first.stop()
    until(lambda: mine()[-1] == second.url, "the other one in its place")
    second.stop()
    for told in (mine, all_of_them, others):
        until(lambda told=told: told()[-1] is None, "none to be left")
