"""The indexer as an object in the caller's process."""

from __future__ import annotations

import re
import socket
import threading

import pytest

from kvflash import ClosedError, ConfigError, ConflictError, InvalidArgumentError, NotFoundError
from kvflash.indexer import IndexerArgs, IndexerService, WorkerEntry
from service import stored
from support_indexer import IDS, SIZE, publish, query

LOCAL = {"host": "127.0.0.1", "port": 0, "threads": 1}


@pytest.fixture
def service():
    """Makes services that end with the test."""
    made = []

    def make(**settings):
        made.append(IndexerService(**LOCAL, **settings).start())
        return made[-1]

    yield make
    for one in made:
        one.stop()


def test_two_of_them_share_nothing(service, client, engine):
    engines = [engine(replay=False), engine(replay=False)]
    entries = [(WorkerEntry(instance_id=7, dp_rank=1, endpoint=e.endpoint),) for e in engines]
    services = [service(workers=workers, block_size=SIZE, model_name="m") for workers in entries]
    assert services[0].port != services[1].port
    https = [client(made.url) for made in services]
    for at, (made, http) in enumerate(zip(engines, https, strict=True)):
        made.wait_for_subscriber()
        event = stored([1], IDS[4 * at :][:4], block_size=SIZE)
        publish(http, made, event, instance=7, rank=1)
    for at, (made, http) in enumerate(zip(services, https, strict=True)):
        for other in range(2):
            ids = IDS[4 * other :][:4]
            wanted = {"7": {"1": 4 if other == at else 0}}
            assert made.query(ids, model_name="m")["scores"] == wanted
            assert query(http, "m", ids)["scores"] == wanted
    # The end of one is nothing to the other.
    services[0].stop()
    engines[0].wait_for_departure()
    publish(https[1], engines[1], stored([2], IDS[:4], block_size=SIZE), instance=7, rank=1)
    assert query(https[1], "m", IDS[:4])["scores"] == {"7": {"1": 4}}


def test_what_http_says_the_object_says(service, client, engine):
    made, one = engine(replay=False), service()
    http = client(one.url)
    one.register(
        1, made.endpoint, model_name="m", block_size=SIZE, additional_salt="a", lora_name="l"
    )
    made.wait_for_subscriber()
    publish(http, made, stored([1, 2], IDS[:8], block_size=SIZE))
    for fields in ({}, {"cache_salt": "a"}, {"cache_salt": ""}, {"lora_name": "x"}):
        assert one.query(IDS, model_name="m", **fields) == query(http, "m", **fields)
    assert one.query(IDS, model_name="m")["instances"]["1"]["gpu"] == 8
    with pytest.raises(ConflictError, match="additional_salt"):
        one.register(2, made.endpoint, model_name="m", block_size=SIZE, additional_salt="b")
    with pytest.raises(InvalidArgumentError, match="endpoint must be"):
        one.register(2, "nowhere", model_name="m", block_size=SIZE)
    with pytest.raises(InvalidArgumentError, match=r"token_ids\[1\]"):
        one.query([1, -1], model_name="m")
    with pytest.raises(NotFoundError, match="no indexer for model=n tenant=t"):
        one.query([1], model_name="n", tenant_id="t")
    with pytest.raises(NotFoundError, match="dp_rank=9"):
        one.unregister(1, model_name="m", dp_rank=9)
    one.unregister(1, model_name="m")
    made.wait_for_departure()
    assert one.query(IDS, model_name="m")["scores"] == {}


def test_pictures_and_embeddings_are_asked_for(service, client, engine):
    made, one = engine(replay=False), service()
    http = client(one.url)
    one.register(1, made.endpoint, model_name="m", block_size=SIZE)
    made.wait_for_subscriber()
    pictured = stored([1, 2], IDS[:8], block_size=SIZE, extra_keys=[None, [["a", 1]]])
    embedded = stored([3], IDS[8:12], block_size=SIZE, extra_keys=[[b"\x01\xff"]])
    publish(http, made, pictured, embedded)

    def held(ids, **fields):
        found = one.query(ids, model_name="m", **fields)
        if all(isinstance(digest, str) for digest in fields.get("embeds", [])):
            assert found == query(http, "m", ids, **fields)
        return found["scores"]["1"]["0"]

    item = {"identifier": "a", "offset": 5, "length": 2}
    assert held(IDS[:8], mm=[item], lora_path="/sql") == 8
    assert held(IDS[:8], mm=[{**item, "offset": 6}]) == held(IDS[:8]) == 4
    assert held(IDS[8:12], embeds=["01ff"]) == held(IDS[8:12], embeds=[b"\x01\xff"]) == 4
    assert held(IDS[8:12], embeds=["01fe"]) == held(IDS[8:12]) == 0
    for fields, wanted in (
        ({"mm": [{**item, "identifier": ""}]}, r"mm\[0\].identifier must have 1 to 1024 bytes"),
        ({"embeds": ["01", "xy"]}, r"embeds\[1\] must be 1 to 1024 bytes in hexadecimal digits"),
    ):
        with pytest.raises(InvalidArgumentError, match=wanted):
            one.query(IDS, model_name="m", **fields)
        body = {"token_ids": IDS, "model_name": "m", **fields}
        refused = http.post("/query", body, expect=400)
        assert re.search(wanted, str(refused))


def test_facts_of_engines_are_registered(service, engine):
    made, one = engine(replay=False), service()

    def register(number, **facts):
        one.register(number, made.endpoint, model_name="m", block_size=SIZE, **facts)

    register(1, attention_chunk_size=8, offload_chunk=2 * SIZE)
    with pytest.raises(InvalidArgumentError, match="attention_chunk_size must be at least 1"):
        register(2, attention_chunk_size=0)
    with pytest.raises(InvalidArgumentError, match="offload_chunk must be a multiple of block_siz"):
        register(2, offload_chunk=SIZE + 1)


def test_a_capacity_is_registered(service, client, engine):
    made, one = engine(replay=False), service()
    one.register(1, made.endpoint, model_name="m", block_size=SIZE, capacity_blocks=7)
    (worker,) = client(one.url).get("/workers")
    assert worker["listeners"]["0"]["capacity_blocks"] == 7
    with pytest.raises(InvalidArgumentError, match="capacity_blocks must be at least 1"):
        one.register(2, made.endpoint, model_name="m", block_size=SIZE, capacity_blocks=0)


def test_it_starts_once_and_stops_once(client):
    one = IndexerService(**LOCAL)
    with pytest.raises(ClosedError, match="before it is started"):
        _ = one.url
    with one:
        assert client(one.url).call("GET", "/health")[0] == 200
        with pytest.raises(ClosedError, match="can start only once"):
            one.start()
    one.stop()
    with pytest.raises(ClosedError, match="can start only once"):
        one.start()
    assert not [t for t in threading.enumerate() if t.name in {"kvflash-orders", "kvflash-zmq"}]


def test_one_that_could_not_start_does_not_start_later():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        one = IndexerService(**{**LOCAL, "port": taken.getsockname()[1]})
        with pytest.raises(ConfigError, match="can't listen"):
            one.start()
    with pytest.raises(ClosedError, match="can start only once"):
        one.start()
    one.stop()


def test_what_cannot_work_is_refused_by_name(service):
    with pytest.raises(TypeError, match="prot"):
        IndexerService(prot=8090)
    with pytest.raises(ConfigError, match="--threads must be"):
        IndexerService(IndexerArgs(), threads=0)
    with pytest.raises(ConfigError, match="--port"):
        IndexerService(host="127.0.0.1", port=service().port).start()
    never_started = IndexerService(**LOCAL)
    never_started.stop()
