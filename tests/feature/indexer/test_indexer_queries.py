"""The standalone indexer's answers: events over real ZMQ, queries over real HTTP."""

from __future__ import annotations

import pytest

from kvflash import (
    compute_block_hash_for_seq,
)
from service import (
    cleared,
    listener,
    removed,
    stored,
)
from support_indexer import IDS, SIZE, metric, publish, query, register

# -- queries


def test_query_has_the_published_shape(http, engine, model):
    made = engine(replay=False)
    register(http, made, model)
    register(http, engine(replay=False), model, 2, dp_rank=1)
    publish(http, made, stored([1, 2], IDS[:8], block_size=SIZE))
    zeros = {"longest_matched": 0, "gpu": 0, "dp": {"1": 0}, "cpu": 0, "disk": 0}
    assert query(http, model) == {
        "scores": {"1": {"0": 8}, "2": {"1": 0}},
        "frequencies": [1, 1],
        "instances": {
            "1": {"longest_matched": 8, "gpu": 8, "dp": {"0": 8}, "cpu": 8, "disk": 8},
            "2": zeros,
        },
    }
    assert query(http, model, [])["scores"] == {"1": {"0": 0}, "2": {"1": 0}}
    assert query(http, model, IDS[:7])["scores"]["1"]["0"] == 4
    assert query(http, model, [9, *IDS])["scores"]["1"]["0"] == 0
    error = http.post("/query", {"token_ids": IDS, "model_name": "none"}, expect=404)["error"]
    assert error == "no indexer for model=none tenant=default"


def test_query_by_hash_takes_both_signs(http, engine, model):
    made = engine(replay=False)
    register(http, made, model)
    publish(http, made, stored([1, 2, 3, 4], IDS, block_size=SIZE))
    hashes = compute_block_hash_for_seq(IDS, SIZE)
    wanted = query(http, model)
    assert wanted["scores"] == {"1": {"0": 16}}
    signed = [h - 2**64 if h >= 2**63 else h for h in hashes]
    for form in (hashes, signed):
        body = {"block_hashes": form, "model_name": model, "cache_salt": "said already"}
        assert http.post("/query_by_hash", body) == wanted
    body = {"block_hashes": hashes, "model_name": "none"}
    assert "no indexer for model=none" in http.post("/query_by_hash", body, expect=404)["error"]


@pytest.mark.parametrize("named", [True, False], ids=["maps", "arrays"])
def test_both_eras_of_events(http, engine, model, named):
    made = engine(replay=False)
    register(http, made, model)
    root = stored([11, 2**64 - 5], IDS[:8], block_size=SIZE, named=named, medium="GPU")
    child = stored([77], IDS[8:12], -5, block_size=SIZE, named=named)
    publish(http, made, root, child)
    assert query(http, model)["scores"] == {"1": {"0": 12}}
    publish(http, made, removed([77], named=named))
    assert query(http, model)["scores"] == {"1": {"0": 8}}
    # The last 8 bytes of a digest are the name that integers have.
    digests = [bytes(range(24)) + n.to_bytes(8, "big") for n in (501, 502)]
    publish(
        http,
        made,
        cleared(named=named),
        stored(digests, IDS[:8], block_size=SIZE, named=named),
        stored([503], IDS[8:12], 502, block_size=SIZE, named=named),
    )
    assert query(http, model)["scores"] == {"1": {"0": 12}}
    entry = publish(http, made, removed([digests[1]], named=named))
    assert query(http, model)["scores"] == {"1": {"0": 4}}
    assert entry["events"]["orphaned"] == entry["events"]["unknown_removed"] == 0


@pytest.mark.parametrize("named", [True, False], ids=["maps", "arrays"])
def test_lora_and_salt_take_part(http, engine, model, named):
    made = engine(replay=False)
    register(http, made, model)
    names = iter(range(1, 100))

    def chain(ids, *, salt=None, **fields):
        """Two blocks in two events; vLLM names the salt with the first one only."""
        first, second = next(names), next(names)
        keys = {"extra_keys": [[salt]]} if salt else {}
        return [
            stored([first], ids[:4], block_size=SIZE, named=named, **keys, **fields),
            stored([second], ids[4:8], first, block_size=SIZE, named=named, **fields),
        ]

    publish(
        http,
        made,
        *chain(IDS[:8]),
        *chain(IDS[4:12], lora_name="sql"),
        *chain(IDS[8:16], salt="tenant-a"),
    )

    def score(ids, **fields):
        return query(http, model, ids, **fields)["scores"]["1"]["0"]

    identities = ({}, {"lora_name": "sql"}, {"cache_salt": "tenant-a"}, {"cache_salt": "sql"})
    held = [(IDS[:8], {}), (IDS[4:12], identities[1]), (IDS[8:16], identities[2])]
    for ids, owner in held:
        for identity in identities:
            assert score(ids, **identity) == (8 if identity == owner else 0), (ids, identity)
    assert score(IDS[:8], lora_name="", cache_salt="") == 8
    hashes = compute_block_hash_for_seq(IDS[8:16], SIZE, cache_salt="tenant-a")
    body = {"block_hashes": hashes, "model_name": model}
    assert http.post("/query_by_hash", body)["scores"]["1"]["0"] == 8


def test_tiers_are_cumulative(http, engine, model):
    made, other = engine(replay=False), engine(replay=False)
    register(http, made, model)
    register(http, other, model, 2)
    publish(
        http,
        made,
        stored([1], IDS[:4], block_size=SIZE, medium="GPU"),
        stored([2], IDS[4:8], 1, block_size=SIZE, medium="CPU"),
        stored([3], IDS[8:12], 2, block_size=SIZE, medium="DISK"),
        stored([4], IDS[12:16], 3, block_size=SIZE, medium="EXTERNAL"),
    )
    publish(
        http,
        other,
        stored([1], IDS[:4], block_size=SIZE, medium="CPU_PINNED"),
        stored([1], IDS[:4], block_size=SIZE, medium="DISK"),
        stored([2], IDS[4:8], 1, block_size=SIZE, medium="external"),
        stored([3], IDS[8:12], 2, block_size=SIZE, medium="MOON"),
        instance=2,
    )
    assert query(http, model)["instances"] == {
        "1": {"longest_matched": 16, "gpu": 4, "dp": {"0": 4}, "cpu": 8, "disk": 16},
        "2": {"longest_matched": 8, "gpu": 0, "dp": {"0": 0}, "cpu": 4, "disk": 8},
    }
    assert listener(http, 2)["events"]["unknown_medium"] == 1
    # A tier's copy goes alone.
    publish(http, made, stored([2], IDS[4:8], 1, block_size=SIZE, medium="GPU"))
    assert query(http, model)["instances"]["1"]["gpu"] == 8
    publish(http, made, removed([2], medium="CPU"))
    assert query(http, model)["instances"]["1"]["cpu"] == 8
    publish(http, made, removed([2], medium="GPU"))
    assert query(http, model)["instances"]["1"] == {
        "longest_matched": 4,
        "gpu": 4,
        "dp": {"0": 4},
        "cpu": 4,
        "disk": 4,
    }
    publish(http, made, cleared())
    assert query(http, model)["instances"]["1"]["longest_matched"] == 0


def test_blocks_offloaded_by_name_alone_are_credited(http, engine, model):
    """vLLM's offloading connector names the blocks it copied to a tier, without their tokens."""
    made = engine(replay=False)
    register(http, made, model)
    publish(http, made, stored([1, 2], IDS[:8], block_size=SIZE, medium="GPU"))
    entry = publish(
        http,
        made,
        stored([1, 2], [], block_size=0, medium="CPU"),
        removed([1, 2], medium="GPU"),
    )
    assert entry["events"]["malformed"] == 0
    assert query(http, model)["instances"]["1"]["cpu"] == 8


def test_a_batch_names_its_rank(http, engine, model):
    made = engine(replay=False)
    register(http, made, model, dp_rank=2)
    publish(http, made, stored([1], IDS[:4], block_size=SIZE), rank=2)
    publish(http, made, stored([1, 2], IDS[:8], block_size=SIZE), rank=2, dp_rank=7)
    answer = query(http, model)
    assert answer["scores"] == {"1": {"2": 4, "7": 8}}
    assert answer["instances"]["1"]["gpu"] == 8
    assert answer["instances"]["1"]["dp"] == {"2": 4, "7": 8}
    assert answer["frequencies"] == [2, 1]
    publish(http, made, cleared(), rank=2, dp_rank=7)
    assert query(http, model)["scores"]["1"] == {"2": 4, "7": 0}
    publish(http, made, stored([1, 2], IDS[:8], block_size=SIZE), rank=2, dp_rank=7)
    # The socket that spoke for the rank takes its blocks along.
    http.post("/unregister", {"instance_id": 1, "model_name": model, "dp_rank": 2})
    assert query(http, model)["scores"] == {}
    assert http.get("/dump")[f"{model}:default"]["events"] == []


def test_models_and_tenants_are_apart(http, engine, model):
    places = [(model, "default"), (model, "b"), (f"{model}-2", "default")]
    for instance, (name, tenant) in enumerate(places):
        made = engine(replay=False)
        register(http, made, name, instance, tenant_id=tenant)
        block = stored([1], IDS[4 * instance :][:4], block_size=SIZE)
        publish(http, made, block, instance=instance)
    for instance, (name, tenant) in enumerate(places):
        for other in range(3):
            ids = IDS[4 * other :][:4]
            scores = query(http, name, ids, tenant_id=tenant)["scores"]
            assert scores == {str(instance): {"0": 4 if other == instance else 0}}
    assert {f"{name}:{tenant}" for name, tenant in places} <= set(http.get("/dump"))


def test_reuse_ends_where_every_group_can_go_on(http, engine, model):
    made = engine(replay=False)
    register(http, made, model)
    groups = [
        {"group_idx": 0, "kv_cache_spec_kind": "sliding_window"},
        {"group_idx": 1, "kv_cache_spec_kind": "mamba"},
        {"group_idx": 2, "kv_cache_spec_kind": "full_attention"},
        {"group_idx": 3, "kv_cache_spec_kind": "full_attention"},
    ]
    entry = publish(
        http,
        made,
        *(stored([1, 2], IDS[:8], block_size=SIZE, **group) for group in groups[:2]),
    )
    assert query(http, model)["scores"] == {"1": {"0": 0}}
    assert entry["events"]["other_group"] == 2
    publish(
        http,
        made,
        *(stored([1, 2], IDS[:8], block_size=SIZE, **group) for group in groups[2:]),
    )
    assert query(http, model)["scores"] == {"1": {"0": 8}}
    # A state is needed at the end of the prefix only.
    publish(http, made, removed([2], group_idx=1))
    assert query(http, model)["scores"] == {"1": {"0": 4}}
    # A window of unknown length may be any: all of it must be held.
    entry = publish(http, made, removed([1], group_idx=0))
    assert query(http, model)["scores"] == {"1": {"0": 0}}
    assert entry["events"]["other_group"] == 5


def test_another_block_size_is_counted_and_seen(http, engine, model):
    made = engine(replay=False)
    register(http, made, model)
    before = metric(http, "kvflash_kvindexer_events_total").get('{kind="block_size_mismatch"}', 0)
    entry = publish(http, made, stored([1, 2], IDS, block_size=8))
    assert entry["events"]["block_size_mismatch"] == 1
    assert query(http, model)["scores"] == {"1": {"0": 0}}
    events = metric(http, "kvflash_kvindexer_events_total")
    assert events['{kind="block_size_mismatch"}'] == before + 1


def test_events_that_are_wrong_cost_themselves_only(http, engine, model):
    made = engine(replay=False)
    register(http, made, model)
    entry = publish(
        http,
        made,
        {"type": "FutureEvent", "x": 1},
        ["FutureEvent", 1, 2],
        stored([1], IDS[:3], block_size=SIZE),
        stored([5], IDS[:4], 99, block_size=SIZE),
        stored([6, 6], IDS[:8], block_size=SIZE),
        {"type": "BlockStored", "block_hashes": "no"},
        removed([12345]),
        stored([1], IDS[:4], block_size=SIZE, later={"a": [1]}),
    )
    events = entry["events"]
    assert (events["unknown_type"], events["malformed"], events["orphaned"]) == (2, 2, 1)
    assert (events["self_parent"], events["unknown_removed"], events["stored"]) == (1, 1, 1)
    assert query(http, model)["scores"] == {"1": {"0": 4}}
