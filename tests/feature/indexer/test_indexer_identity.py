"""Adapter and salt of an index; ranks that go alone."""

from __future__ import annotations

import pytest

from kvflash import compute_block_hash_for_seq
from service import cleared, dumped_blocks, listener, stored, until
from support_indexer import IDS, SIZE, publish, query, register

FIELDS = [("additional_salt", "cache_salt"), ("lora_name", "lora_name")]


@pytest.mark.parametrize(("field", "asked"), FIELDS)
def test_what_an_index_says_holds_for_events_and_queries_that_say_nothing(
    http, engine, model, field, asked
):
    made = engine(replay=False)
    register(http, made, model, **{field: "a"})
    publish(
        http,
        made,
        stored([1], IDS[:4], block_size=SIZE),
        stored([2], IDS[4:8], 1, block_size=SIZE),
    )

    def score(**fields):
        return query(http, model, **fields)["scores"]["1"]["0"]

    assert score() == score(**{asked: "a"}) == score(**{asked: None}) == 8
    assert score(**{asked: "b"}) == score(**{asked: ""}) == 0
    # Clients that hash on their own use it for hashing.
    for salt, wanted in (("a", 8), (None, 0)):
        hashes = compute_block_hash_for_seq(IDS, SIZE, **{asked: salt})
        body = {"model_name": model, "block_hashes": hashes}
        assert http.post("/query_by_hash", body)["scores"]["1"]["0"] == wanted


def test_events_with_a_salt_or_an_adapter_of_their_own_keep_it(http, engine, model):
    made = engine(replay=False)
    register(http, made, model, additionalsalt="tenant", lora_name="sql")
    publish(
        http,
        made,
        stored([1], IDS[:4], block_size=SIZE, cache_salt="own"),
        stored([2], IDS[4:8], block_size=SIZE, extra_keys=[["vllm"]]),
        stored([3], IDS[8:12], block_size=SIZE, lora_name="chat"),
    )

    def score(ids, **fields):
        return query(http, model, ids, **fields)["scores"]["1"]["0"]

    assert score(IDS[:4], cache_salt="own") == 4
    assert score(IDS[4:8], cache_salt="vllm") == 4
    assert score(IDS[8:12], lora_name="chat") == 4
    assert [score(IDS[at : at + 4]) for at in (0, 4, 8)] == [0, 0, 0]


@pytest.mark.parametrize(("field", "asked"), FIELDS)
def test_the_first_registration_decides_and_the_last_unregistration_forgets(
    http, engine, model, field, asked
):
    first, second = engine(replay=False), engine(replay=False)
    register(http, first, model, 1, **{field: "a"})
    for other in ("b", ""):
        error = register(http, second, model, 2, expect=409, **{field: other})["error"]
        assert field in error
        assert f'"{other}"' in error
        assert '"a"' in error
    register(http, second, model, 2)
    register(http, second, model, 2, dp_rank=1, is_awaited=False, **{field: "a"})
    publish(http, second, stored([1], IDS[:4], block_size=SIZE), instance=2)
    assert query(http, model, **{asked: "a"})["scores"]["2"]["0"] == 4
    # Another tenant of the model is not affected.
    register(http, engine(replay=False), model, 3, tenant_id="other", **{field: "b"})
    for instance in (1, 2):
        http.post("/unregister", {"instance_id": instance, "model_name": model})
    register(http, first, model, 1, is_awaited=False, **{field: "b"})


def test_an_index_without_a_salt_takes_none_later(http, engine, model):
    register(http, engine(replay=False), model)
    error = register(http, engine(replay=False), model, 2, expect=409, additional_salt="a")["error"]
    assert 'additional_salt "a" differs from ""' in error
    register(http, engine(replay=False), model, 2, additional_salt="")


def test_a_salt_has_two_names(http, engine, model):
    made = engine(replay=False)
    register(http, made, model)
    publish(http, made, stored([1], IDS[:4], block_size=SIZE, cache_salt="a"))
    for fields in (
        {"additional_salt": "a"},
        {"additionalsalt": "a"},
        {"cache_salt": "a", "additional_salt": "a"},
        {"cache_salt": "a", "additional_salt": None},
    ):
        assert query(http, model, **fields)["scores"]["1"]["0"] == 4, fields
    body = {"model_name": model, "token_ids": IDS, "cache_salt": "a", "additional_salt": "b"}
    error = http.post("/query", body, expect=400)["error"]
    assert "cache_salt" in error
    assert "additional_salt" in error


# -- ranks


def test_a_rank_that_only_events_named_goes_alone(http, engine, model):
    made = engine(replay=False)
    register(http, made, model)
    publish(http, made, stored([1, 2], IDS[:8], block_size=SIZE))
    for rank in (5, 6):
        publish(http, made, stored([1], IDS[:4], block_size=SIZE), dp_rank=rank)
    body = {"instance_id": 1, "model_name": model, "dp_rank": 5}
    for wrong in ({"tenant_id": "another"}, {"model_name": "another"}, {"dp_rank": 7}):
        http.post("/unregister", {**body, **wrong}, expect=404)
    assert query(http, model)["scores"] == {"1": {"0": 8, "5": 4, "6": 4}}
    http.post("/unregister", body)
    assert query(http, model)["scores"] == {"1": {"0": 8, "6": 4}}
    assert query(http, model, [9] * 4)["scores"] == {"1": {"0": 0, "6": 0}}
    assert {fact[1] for fact in dumped_blocks(http, f"{model}:default")} == {0, 6}
    assert http.get("/workers")[0]["dynamic_dp_ranks"] == [6]
    http.post("/unregister", body, expect=404)
    # The listener stays, and what the engine says of the rank from now on counts.
    until(lambda: listener(http, 1)["status"] == "active", "the listener")
    publish(http, made, stored([3], IDS[:4], block_size=SIZE), dp_rank=5)
    assert query(http, model)["scores"] == {"1": {"0": 8, "5": 4, "6": 4}}
    http.post("/unregister", {"instance_id": 1, "model_name": model})
    assert query(http, model)["scores"] == {}


def test_a_rank_without_a_tenant_is_just_that_rank(http, engine, model):
    """Of a registered rank the listener goes, from whichever socket its blocks came."""
    first, second = engine(replay=False), engine(replay=False)
    register(http, first, model)
    register(http, second, model, dp_rank=1)
    publish(http, first, stored([1], IDS[:4], block_size=SIZE), dp_rank=1)
    publish(http, first, stored([1], IDS[:4], block_size=SIZE))
    publish(http, second, stored([1, 2], IDS[:8], block_size=SIZE), rank=1)
    http.post("/unregister", {"instance_id": 1, "model_name": model, "dp_rank": 1})
    second.wait_for_departure()
    assert query(http, model)["scores"] == {"1": {"0": 4}}
    assert set(http.get("/workers")[0]["listeners"]) == {"0"}
    assert http.get("/workers")[0]["dynamic_dp_ranks"] == []


def test_workers_without_a_match_are_named_as_soon_as_they_are_known(http, engine, model):
    made = engine(replay=False)
    register(http, made, model)
    assert query(http, model)["scores"] == {"1": {"0": 0}}
    publish(http, made, cleared(), dp_rank=3)
    assert query(http, model)["scores"] == {"1": {"0": 0, "3": 0}}
    register(http, engine(replay=False), model, 2)
    assert query(http, model)["scores"] == {"1": {"0": 0, "3": 0}, "2": {"0": 0}}
    http.post("/unregister", {"instance_id": 1, "model_name": model})
    assert query(http, model)["scores"] == {"2": {"0": 0}}
