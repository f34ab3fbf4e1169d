"""POST /query and /query_by_hash in msgpack; refusals of query strings."""

from __future__ import annotations

import json
import struct

import msgpack
import pytest

from kvflash import compute_block_hash_for_seq
from service import stored
from support_indexer import IDS, SIZE, publish, query, register

MSGPACK = "application/msgpack"


@pytest.fixture
def held(http, engine, model):
    """A model with one worker that holds three of four blocks, and one that holds none."""
    made = engine(replay=False)
    register(http, made, model)
    register(http, engine(replay=False), model, 2, dp_rank=1)
    publish(http, made, stored([1, 2, 3], IDS[:12], block_size=SIZE))
    return model


def ask(http, path, body, kind=MSGPACK, *, accept=None, expect=200):
    """A body in msgpack (or bytes as they are); the answer and its media type."""
    data = body if isinstance(body, bytes) else msgpack.packb(body)
    headers = {"content-type": kind, **({"accept": accept} if accept else {})}
    status, answer, heads = http.call("POST", path, data, headers)
    assert status == expect, (status, answer)
    return answer, heads["content-type"]


@pytest.mark.parametrize(
    "kind", [MSGPACK, "application/x-msgpack", "Application/VND.msgpack; charset=binary"]
)
def test_a_msgpack_query_answers_as_a_json_one(http, held, kind):
    wanted = query(http, held)
    assert wanted["scores"] == {"1": {"0": 12}, "2": {"1": 0}}
    forms = [IDS, struct.pack("<16I", *IDS)]
    for token_ids in forms:
        body = {"token_ids": token_ids, "model_name": held, "later": [{"a": None}]}
        assert ask(http, "/query", body, kind) == (wanted, "application/json")
    hashes = compute_block_hash_for_seq(IDS, SIZE)
    signed = [h - 2**64 if h >= 2**63 else h for h in hashes]
    for block_hashes in (hashes, signed, struct.pack("<4Q", *hashes)):
        body = {"block_hashes": block_hashes, "model_name": held}
        assert ask(http, "/query_by_hash", body, kind)[0] == wanted


def test_an_answer_comes_in_msgpack_to_whom_accepts_it(http, held):
    wanted = query(http, held)
    bodies = {
        "/query": {"token_ids": IDS, "model_name": held},
        "/query_by_hash": {
            "block_hashes": compute_block_hash_for_seq(IDS, SIZE),
            "model_name": held,
        },
    }
    for path, body in bodies.items():
        forms = ((MSGPACK, msgpack.packb(body)), ("text/plain", json.dumps(body).encode()))
        for kind, data in forms:
            answer, answered = ask(http, path, data, kind, accept=f"{MSGPACK}, */*;q=0.1")
            assert answered == MSGPACK
            assert msgpack.unpackb(answer) == wanted
            assert ask(http, path, data, kind, accept="*/*") == (wanted, "application/json")
    # A refusal is JSON whatever the client accepts.
    body = {"token_ids": [], "model_name": "none"}
    answer, answered = ask(http, "/query", body, accept=MSGPACK, expect=404)
    assert (answer["error"].split()[0], answered) == ("no", "application/json")


@pytest.mark.parametrize(
    "kind", ["application/x-www-form-urlencoded", "text/plain", "application/octet-stream", "x"]
)
def test_json_of_a_type_that_nobody_meant_is_read(http, held, kind):
    body = json.dumps({"token_ids": IDS, "model_name": held}).encode()
    assert ask(http, "/query", body, kind)[0] == query(http, held)


@pytest.mark.parametrize(
    ("token_ids", "wanted"),
    [
        ([1, -5], ["token_ids[1]", "-5"]),
        ([1, 2**32], ["token_ids[1]", "4294967296"]),
        ([1, 2.5], ["token_ids[1]", "2.5"]),
        ([1, None], ["token_ids[1]"]),
        ([1, [2]], ["token_ids[1]"]),
        (b"1234567", ["token_ids", "7 bytes", "multiple of 4"]),
        ("1234", ["token_ids must be a list of integers", '"1234"']),
        (None, ["token_ids"]),
        ({}, ["token_ids"]),
        (msgpack.ExtType(1, b"1234"), ["token_ids"]),
    ],
)
def test_a_field_at_fault_is_named_in_msgpack_too(http, token_ids, wanted):
    body = {"model_name": "x", "token_ids": token_ids}
    error = ask(http, "/query", body, expect=400)[0]["error"]
    assert all(part in error for part in wanted), error


def test_packed_hashes_are_whole_words(http):
    body = {"model_name": "x", "block_hashes": b"123456789abc"}
    error = ask(http, "/query_by_hash", body, expect=400)[0]["error"]
    assert "block_hashes has 12 bytes" in error
    assert "multiple of 8" in error


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x92\xa1x\x01",
        b"\x05",
        msgpack.packb({"model_name": "x", "token_ids": [1]})[:-1],
        msgpack.packb({"model_name": "x", "token_ids": [1]}) + b"\x01",
        b"\x82\xaamodel_name\xa1x\xa9token_ids\xdd\xff\xff\xff\xff\x01",
        b"\x82\xaamodel_name\xa1x\xa9token_ids\xc6\xff\xff\xff\xff\x01",
        b"\x82\xaamodel_name\xdb\xff\xff\xff\xffx",
        b"\x81\xa1x" + b"\x91" * 1_000_000,
        b"\xdf\xff\xff\xff\xff" + b"\x01" * 100,
        b'{"model_name": "x", "token_ids": []}',
    ],
    ids=range(12),
)
def test_what_is_no_msgpack_request_is_400(http, body):
    assert ask(http, "/query", body, expect=400)[0]["error"].startswith("invalid request body: ")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/workers?model_name=a&model_name=b", "parameter model_name is given twice"),
        ("/workers?model=a", "unknown parameter model; known: model_name"),
        (
            "/dump?typo=1",
            "unknown parameter typo; known: format, model_name, tenant_id",
        ),
        ("/digest?typo=1", "unknown parameter typo"),
    ],
)
def test_a_bad_query_string_is_refused_as_json(http, path, said):
    status, body, headers = http.call("GET", path)
    assert (status, headers["content-type"]) == (400, "application/json")
    assert said in body["error"]
