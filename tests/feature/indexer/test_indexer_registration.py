"""The standalone indexer's workers: registering, unregistering, what /workers says."""

from __future__ import annotations

import socket

import pytest

from service import (
    batch,
    listener,
    stored,
    until,
)
from support_indexer import IDS, REQUIRED, SIZE, publish, query, register

# -- registering


def test_registering_twice_is_a_conflict(http, engine, model):
    first, second = engine(replay=False), engine(replay=False)
    assert register(http, first, model) == {"status": "ok"}
    error = register(http, second, model, expect=409)["error"]
    assert "instance_id 1" in error
    assert "dp_rank 0" in error
    register(http, second, model, dp_rank=1)


def test_an_instance_of_several_models_and_tenants(http, engine, model):
    engines = {
        place: engine(replay=False) for place in ((model, "a"), (model, "b"), ("other", "a"))
    }
    for (name, tenant), made in engines.items():
        register(http, made, name, tenant_id=tenant)
    entries = {(one["model_name"], one["tenant_id"]): one for one in http.get("/workers")}
    assert set(entries) == set(engines)
    assert {one["instance_id"] for one in entries.values()} == {1}
    for place, made in engines.items():
        assert entries[place]["endpoints"] == {"0": made.endpoint}
    made = engines[model, "a"]
    made.publish(batch(stored([1], IDS[:4], block_size=SIZE)))
    held = {"1": {"0": 4}}
    until(lambda: query(http, model, tenant_id="a")["scores"] == held, "the block of one tenant")
    for name, tenant in ((model, "b"), ("other", "a")):
        assert query(http, name, tenant_id=tenant)["scores"] == {"1": {"0": 0}}
    # Without a tenant it leaves all tenants of the model, and no other model.
    http.post("/unregister", {"instance_id": 1, "model_name": model})
    assert [one["model_name"] for one in http.get("/workers")] == ["other"]
    http.post("/unregister", {"instance_id": 1, "model_name": model}, expect=404)


def test_a_model_has_one_block_size(http, engine, model):
    register(http, engine(replay=False), model)
    error = register(http, engine(replay=False), model, 2, expect=409, block_size=32)["error"]
    assert "block_size 32" in error
    assert str(SIZE) in error
    register(http, engine(replay=False), model, 2, block_size=32, tenant_id="another")


def test_block_size_zero_is_400(http, engine, model):
    error = register(http, engine(replay=False), model, expect=400, block_size=0)["error"]
    assert "block_size must be an integer in 1..=4294967295, got 0" in error


def test_the_last_worker_takes_the_block_size_along(http, engine, model):
    made = engine(replay=False)
    register(http, made, model)
    http.post("/unregister", {"instance_id": 1, "model_name": model})
    register(http, engine(replay=False), model, block_size=32)


@pytest.mark.parametrize(
    "endpoint",
    ["tcp://host", "tcp://:5558", "udp://host:5558", "not-an-endpoint", "", "tcp://h:99999"],
)
@pytest.mark.parametrize("field", ["endpoint", "replay_endpoint"])
def test_an_endpoint_that_is_none_is_400_and_named(http, model, field, endpoint):
    body = {**REQUIRED["/register"], "model_name": model, field: endpoint}
    error = http.post("/register", body, expect=400)["error"]
    assert error.startswith(f"{field} must be")
    assert endpoint in error


@pytest.mark.parametrize(
    "endpoint",
    ["tcp://a b:5", "tcp://h:1,tcp://h:2", "tcp://h\n:5", "tcp://é:5", f"tcp://{'a' * 5000}:5"],
)
@pytest.mark.parametrize("field", ["endpoint", "replay_endpoint"])
def test_an_endpoint_that_no_socket_can_dial_is_400_and_not_quoted_whole(
    http, model, field, endpoint
):
    body = {**REQUIRED["/register"], "model_name": model, field: endpoint}
    error = http.post("/register", body, expect=400)["error"]
    assert error.startswith(f"{field} must be tcp://host:port with ")
    assert len(error) < 300


def test_an_empty_tenant_is_400(http):
    body = {**REQUIRED["/register"], "tenant_id": ""}
    assert "tenant_id must not be empty" in http.post("/register", body, expect=400)["error"]


def test_null_is_an_absent_field_in_every_request(http, engine, model):
    absent = {"tenant_id": None, "dp_rank": None}
    register(http, engine(replay=False), model, **absent)
    [entry] = http.get("/workers")
    assert (entry["tenant_id"], list(entry["endpoints"])) == ("default", ["0"])
    assert query(http, model, tenant_id=None)["scores"] == {"1": {"0": 0}}
    http.post("/unregister", {"instance_id": 1, "model_name": model, **absent})


def test_an_empty_model_name_is_400(http):
    body = {**REQUIRED["/register"], "model_name": ""}
    assert "model_name" in http.post("/register", body, expect=400)["error"]


def test_unregistering_what_is_not_there_is_404(http, engine, model):
    register(http, engine(replay=False), model)
    for body in (
        {"instance_id": 9, "model_name": model},
        {"instance_id": 1, "model_name": "another"},
        {"instance_id": 1, "model_name": model, "tenant_id": "another"},
        {"instance_id": 1, "model_name": model, "dp_rank": 7},
    ):
        error = http.post("/unregister", body, expect=404)["error"]
        assert f"instance_id {body['instance_id']}" in error
    assert http.post("/unregister", {"instance_id": 1, "model_name": model}) == {"status": "ok"}


def test_unregistering_a_rank_an_instance_a_tenant(http, engine, model):
    engines = {rank: engine(replay=False) for rank in range(3)}
    for rank, made in engines.items():
        register(http, made, model, dp_rank=rank)
        publish(http, made, stored([1], IDS[:4], block_size=SIZE), rank=rank)
    other = engine(replay=False)
    register(http, other, model, 2, tenant_id="b")
    publish(http, other, stored([1], IDS[:4], block_size=SIZE), instance=2)
    assert query(http, model)["scores"] == {"1": {"0": 4, "1": 4, "2": 4}}

    http.post("/unregister", {"instance_id": 1, "model_name": model, "dp_rank": 1})
    assert query(http, model)["scores"] == {"1": {"0": 4, "2": 4}}
    engines[1].wait_for_departure()
    body = {"instance_id": 1, "model_name": model, "tenant_id": "b"}
    http.post("/unregister", body, expect=404)
    # Without a tenant, all ranks of the instance go.
    http.post("/unregister", {"instance_id": 1, "model_name": model})
    assert query(http, model) == {"scores": {}, "frequencies": [], "instances": {}}
    assert query(http, model, tenant_id="b")["scores"] == {"2": {"0": 4}}
    http.post("/unregister", {"instance_id": 2, "model_name": model, "tenant_id": "b"})
    assert query(http, model, tenant_id="b")["scores"] == {}
    other.wait_for_departure()


def test_registering_again_starts_anew(http, engine, model):
    made = engine()
    register(http, made, model, replay_endpoint=made.replay_endpoint)
    publish(http, made, stored([1], IDS[:4], block_size=SIZE))
    http.post("/unregister", {"instance_id": 1, "model_name": model})
    made.wait_for_departure()
    assert query(http, model)["scores"] == {}
    # The replay brings back what was published before.
    register(http, made, model, replay_endpoint=made.replay_endpoint)
    again = {"1": {"0": 4}}
    until(lambda: query(http, model)["scores"] == again, "what the engine still has")


# -- workers


def test_workers_have_the_published_shape(http, engine, model):
    assert http.get("/workers") == []
    first, second = engine(), engine(replay=False)
    register(http, first, model, replay_endpoint=first.replay_endpoint)
    register(http, second, model, dp_rank=1)
    publish(http, second, stored([1, 2], IDS[:8], block_size=SIZE), rank=1)
    publish(http, first, stored([1], IDS[:4], block_size=SIZE), dp_rank=5)
    until(lambda: http.get("/workers")[0]["status"] == "active", "both to be active")
    [worker] = http.get("/workers")
    assert {name: worker[name] for name in ("instance_id", "source", "status", "endpoints")} == {
        "instance_id": 1,
        "source": "zmq",
        "status": "active",
        "endpoints": {"0": first.endpoint, "1": second.endpoint},
    }
    assert (worker["model_name"], worker["tenant_id"]) == (model, "default")
    assert (worker["block_size"], worker["blocks"], worker["dynamic_dp_ranks"]) == (SIZE, 3, [5])
    assert set(worker["listeners"]) == {"0", "1"}
    entry = worker["listeners"]["0"]
    assert (entry["endpoint"], entry["status"]) == (first.endpoint, "active")
    assert entry["replay_endpoint"] == first.replay_endpoint
    # The manual says that these are left out while unset.
    assert not {"last_error", "capacity_blocks"} & entry.keys()
    assert entry["last_sequence"] == 0
    assert 0 <= entry["last_event_age_ms"] < 60_000
    assert entry["events"]["batches"] == entry["events"]["stored"] == 1
    assert "replay_endpoint" not in worker["listeners"]["1"]


def test_workers_of_one_model(http, engine, model):
    register(http, engine(replay=False), model)
    register(http, engine(replay=False), f"{model}-2", 2)
    assert [w["instance_id"] for w in http.get("/workers")] == [1, 2]
    assert [w["instance_id"] for w in http.get(f"/workers?model_name={model}-2")] == [2]
    assert http.get("/workers?model_name=none") == []


def test_a_worker_is_pending_until_its_engine_is_there(http, engine, model):
    made = engine(replay=False)
    made.pub.close(0)
    until(lambda: _is_refused(made.endpoint), "the port to be closed")
    register(http, made, model, is_awaited=False)
    entry = listener(http, 1)
    assert (entry["status"], entry["last_sequence"]) == ("pending", None)
    until(lambda: "connecting fails" in listener(http, 1).get("last_error", ""), "the reason")
    made.start()
    until(lambda: listener(http, 1)["status"] == "active", "the connection")
    assert "last_error" not in listener(http, 1)
    made.pub.close(0)
    until(lambda: listener(http, 1)["status"] == "pending", "the loss to be seen")


def test_a_host_without_an_address_is_told(http, engine, model):
    register(http, engine(replay=False), model, is_awaited=False, endpoint="tcp://gpu.invalid:5557")
    reason = "the host of the address is unknown here (DNS)"
    until(lambda: reason in listener(http, 1).get("last_error", ""), "the reason")


def _is_refused(endpoint):
    host, port = endpoint.removeprefix("tcp://").split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) != 0


def test_an_address_that_cannot_be_connected_is_failed(http, model):
    endpoint = "tcp://127.0.0.1:*"
    body = {**REQUIRED["/register"], "model_name": model, "endpoint": endpoint}
    http.post("/register", body, expect=201)
    until(lambda: listener(http, 1)["status"] == "failed", "failed")
    assert endpoint in listener(http, 1)["last_error"]
    # The transport serves others all the same, and the failed one can go.
    http.post("/unregister", {"instance_id": 1, "model_name": model})


def test_a_failed_rank_fails_its_instance(http, engine, model):
    register(http, engine(replay=False), model)
    until(lambda: http.get("/workers")[0]["status"] == "active", "active")
    body = {**REQUIRED["/register"], "model_name": model, "endpoint": "tcp://127.0.0.1:*"}
    http.post("/register", {**body, "dp_rank": 1}, expect=201)
    until(lambda: http.get("/workers")[0]["status"] == "failed", "failed")
    assert listener(http, 1)["status"] == "active"
