"""The publisher over real sockets, into a real index."""

from __future__ import annotations

import asyncio
import logging
import os
import threading

import msgpack
import pytest
import zmq

from kvflash.errors import ClosedError, ConfigError, InvalidArgumentError
from kvflash.publisher import EventStream, KvEventPublisher
from service import listener, until, wait_for_sequence
from support_indexer import query
from support_publisher import SIZE, store, tokens_of


def register(http, model, publisher, instance=1, rank=0, **fields):
    body = {
        "instance_id": instance,
        "endpoint": publisher.endpoint,
        "replay_endpoint": publisher.replay_endpoint,
        "model_name": model,
        "block_size": SIZE,
        "dp_rank": rank,
        **fields,
    }
    http.post("/register", body, expect=201)
    until(lambda: listener(http, instance, rank)["status"] == "active", "the publisher's socket")


def applied(http, publisher, instance=1, rank=0):
    """Wait until the index has everything that was published."""
    assert publisher.flush()
    wait_for_sequence(http, instance, publisher.stats()["batches_total"] - 1, rank)


def scores(http, model, tokens, instance=1, **fields):
    """Tokens that each rank of an instance holds of a prompt."""
    held = query(http, model, tokens, **fields)["scores"].get(str(instance), {})
    return {rank: count for rank, count in held.items() if count}


def test_what_was_published_is_what_matches(http, publisher, model):
    made = publisher()
    register(http, model, made)
    tokens = tokens_of(100, 3)
    store(made, [11, -2], tokens[:8])
    store(made, [13], tokens[8:], parent=-2)
    applied(http, made)
    assert scores(http, model, [*tokens, 7]) == {"0": 12}
    made.publish_removed([13])
    applied(http, made)
    assert scores(http, model, tokens) == {"0": 8}
    # The same names, unsigned.
    made.publish_removed(block_hashes=[(1 << 64) - 2])
    applied(http, made)
    assert scores(http, model, tokens) == {"0": 4}
    made.publish_cleared()
    applied(http, made)
    assert scores(http, model, tokens) == {}


def test_older_calls_lead_with_an_event_id(http, publisher, model):
    made = publisher()
    register(http, model, made)
    tokens = tokens_of(0, 2)
    made.publish_stored(0, tokens[:4], [SIZE], [1], 0)
    made.publish_stored(1, tokens[4:], [SIZE], [2], 0, 1)
    made.publish_stored(tokens_of(50, 1), [SIZE], [3])
    applied(http, made)
    assert scores(http, model, tokens) == {"0": 8}
    assert scores(http, model, tokens_of(50, 1)) == {"0": 4}
    made.publish_removed(2, [2])
    made.publish_removed(event_id=3, block_hashes=[3])
    applied(http, made)
    assert scores(http, model, tokens) == {"0": 4}
    assert scores(http, model, tokens_of(50, 1)) == {}


def test_each_rank_has_a_publisher(http, publisher, model):
    ranks = [publisher(dp_rank=rank) for rank in (0, 1)]
    for rank, made in enumerate(ranks):
        register(http, model, made, rank=rank)
        store(made, [1, 2][: rank + 1], tokens_of(0, rank + 1))
        applied(http, made, rank=rank)
    assert scores(http, model, tokens_of(0, 2)) == {"0": 4, "1": 8}


def test_adapter_and_salt_keep_blocks_apart(http, publisher, model):
    made = publisher()
    register(http, model, made)
    tokens = tokens_of(0, 2)
    store(made, [1], tokens[:4], lora_name="sql")
    store(made, [2, 3], tokens, cache_salt="tenant-a")
    store(made, [4, 5], tokens, lora_id=7)
    # Later blocks inherit the salt of their parent.
    store(made, [6], tokens_of(90, 1), parent=3)
    applied(http, made)
    assert scores(http, model, tokens) == {}
    assert scores(http, model, tokens, lora_name="sql") == {"0": 4}
    assert scores(http, model, tokens, cache_salt="tenant-b") == {}
    salted = [*tokens, *tokens_of(90, 1)]
    assert scores(http, model, salted, cache_salt="tenant-a") == {"0": 12}
    store(made, [8], tokens[:4], lora_id=0, lora_name="", cache_salt="")
    applied(http, made)
    assert scores(http, model, tokens) == {"0": 4}


def media(number, start, end):
    """An engine's item that covers a part of a block."""
    return {"mm_objects": [{"mm_hash": number, "offsets": [[start, end]]}]}


def identifier(number):
    """64 hexadecimal digits, which begin with the hash."""
    return f"{number:016x}" + "0" * 48


def test_items_are_part_of_their_block(publisher, zmq_socket):
    made = publisher()
    subscriber = subscribed(made, zmq_socket)
    store(made, [1, 2], tokens_of(0, 2), block_mm_infos=[None, media(255, 1, 3)])
    (event,) = received(subscriber)[1]
    assert event["extra_keys"] == [None, [[identifier(255), 1]]]


def test_an_item_of_several_blocks_begins_in_the_first(publisher, zmq_socket):
    made = publisher()
    subscriber = subscribed(made, zmq_socket)
    store(made, [1, 2], tokens_of(0, 2), block_mm_infos=[media(7, 3, 4), media(7, 0, 4)])
    # A later call goes on, from whichever block it names.
    store(made, [3], tokens_of(8, 1), parent=2, block_mm_infos=[media(7, 0, 2)])
    store(made, [4], tokens_of(8, 1), parent=1, block_mm_infos=[media(7, -1, 2)])
    # Another item, and one behind a block that the item did not fill, begin where they are.
    store(made, [5], tokens_of(8, 1), parent=2, block_mm_infos=[media(8, 0, 4)])
    store(made, [6], tokens_of(12, 1), parent=3, block_mm_infos=[media(7, 0, 4)])
    assert made.stats()["open_item_blocks"] == 4
    found = []
    while len(found) < 5:
        found += [event["extra_keys"] for event in received(subscriber)[1]]
    item = identifier(7)
    assert found == [
        [[[item, 3]], [[item, -1]]],
        [[[item, -5]]],
        [[[item, -1]]],
        [[[identifier(8), 0]]],
        [[[item, 0]]],
    ]
    made.publish_cleared()
    assert made.stats()["open_item_blocks"] == 0


def test_a_prompt_with_the_same_pictures_matches(http, publisher, model):
    made = publisher()
    register(http, model, made)
    tokens = tokens_of(0, 3)
    first = [None, media(7, 2, 4)]
    store(made, [1, 2], tokens[:8], block_mm_infos=first)
    store(made, [3], tokens[8:], parent=2, block_mm_infos=[media(7, 0, 3)])
    applied(http, made)

    def held(*items):
        mm = [dict(zip(("identifier", "offset", "length"), one, strict=True)) for one in items]
        return scores(http, model, tokens, mm=mm)

    assert held((identifier(7), 6, 5)) == {"0": 12}
    assert held((identifier(7), 7, 4)) == {"0": 4}
    assert held((identifier(8), 6, 5)) == {"0": 4}
    assert held() == {"0": 4}


def subscribed(publisher, zmq_socket):
    """A subscriber that the publisher knows of."""
    socket = zmq_socket(zmq.SUB)
    socket.connect(publisher.endpoint)
    socket.subscribe(b"")

    def heard():
        publisher.publish_cleared()
        publisher.flush()
        return socket.poll(10)

    until(heard, "the subscription")
    last = publisher.stats()["batches_total"] - 1
    while received(socket)[0] < last:
        pass
    return socket


def received(socket):
    """Number, events and rank of the next batch."""
    assert socket.poll(10_000), "a batch"
    _, number, payload = socket.recv_multipart()
    _, events, rank = msgpack.unpackb(payload)
    return int.from_bytes(number, "big"), events, rank


def test_calls_within_a_tick_are_one_batch(publisher, zmq_socket):
    made = publisher(tick_ms=1_000, dp_rank=3)
    subscriber = subscribed(made, zmq_socket)
    for name in range(10):
        store(made, [name], tokens_of(name, 1))
    made.publish_removed([0])
    number, events, rank = received(subscriber)
    assert [event["type"] for event in events] == ["BlockStored"] * 10 + ["BlockRemoved"]
    assert [event["block_hashes"] for event in events[:10]] == [[name] for name in range(10)]
    assert rank == 3
    assert number == made.stats()["batches_total"] - 1


def test_a_call_that_is_too_long_for_an_event_becomes_several(http, publisher, model):
    made = publisher()
    register(http, model, made)
    blocks = 70_000
    tokens = [index % 50_000 for index in range(blocks * SIZE)]
    store(made, list(range(1, blocks + 1)), tokens)
    assert made.stats()["events_total"] == 2
    applied(http, made)
    assert scores(http, model, tokens) == {"0": blocks * SIZE}


def test_who_comes_late_or_lost_some_gets_all(http, publisher, model):
    made = publisher(tick_ms=0)
    tokens = tokens_of(0, 600)
    for index in range(300):
        store(made, [index + 1], tokens[index * SIZE :][:SIZE], parent=index or None)
        made.flush()
    assert made.stats()["batches_total"] == 300
    register(http, model, made)
    wait_for_sequence(http, 1, 299)
    assert scores(http, model, tokens) == {"0": 1200}
    # A subscriber that is behind: live batches come while the replay is answered.
    for index in range(300, 600):
        store(made, [index + 1], tokens[index * SIZE :][:SIZE], parent=index)
    applied(http, made)
    assert scores(http, model, tokens) == {"0": 2400}
    assert made.stats()["replays_total"] >= 1


def test_the_ring_forgets_the_oldest(publisher, zmq_socket):
    made = publisher(tick_ms=0, ring_batches=3)
    for index in range(8):
        store(made, [index + 1], tokens_of(index, 1))
        made.flush()
    assert replayed(made, zmq_socket, 0) == [5, 6, 7, -1]
    assert replayed(made, zmq_socket, 7) == [7, -1]
    assert replayed(made, zmq_socket, 8) == [-1]
    stats = made.stats()
    assert (stats["ring_batches"], stats["replays_total"]) == (3, 3)


def test_the_ring_has_a_limit_of_bytes(publisher, zmq_socket):
    made = publisher(tick_ms=0, ring_bytes=1 << 20)
    tokens = tokens_of(70_000, 40_000)
    for _ in range(6):
        store(made, list(range(40_000)), tokens)
        made.flush()
    assert made.stats()["ring_bytes"] <= 1 << 20
    assert replayed(made, zmq_socket, 0) == [5, -1]


def replayed(publisher, zmq_socket, first):
    """Numbers of the batches that a replay brings."""
    socket = zmq_socket(zmq.DEALER)
    socket.connect(publisher.replay_endpoint)
    socket.send_multipart([b"", first.to_bytes(8, "big")])
    numbers = []
    while not numbers or numbers[-1] >= 0:
        assert socket.poll(10_000), "the replay"
        numbers.append(int.from_bytes(socket.recv_multipart()[-2], "big", signed=True))
    return numbers


def test_nonsense_on_the_replay_socket_ends_nothing(publisher, zmq_socket):
    made = publisher()
    socket = zmq_socket(zmq.DEALER)
    socket.connect(made.replay_endpoint)
    for frames in ([b"x"], [b"", b"short"], [b"", b"1" * 8, b"more"]):
        socket.send_multipart(frames)
    store(made, [1], tokens_of(0, 1))
    made.flush()
    assert replayed(made, zmq_socket, 0) == [0, -1]


def test_a_new_publisher_begins_at_0_and_with_nothing(http, publisher, model):
    made = publisher(tick_ms=0)
    register(http, model, made)
    for name in range(1, 4):
        store(made, [name], tokens_of(name * 100, 1))
        applied(http, made)
    port, replay_port = (
        int(url.rpartition(":")[2]) for url in (made.endpoint, made.replay_endpoint)
    )
    made.shutdown()
    again = publisher(port=port, replay_port=replay_port)
    store(again, [1], tokens_of(0, 1))
    until(lambda: scores(http, model, tokens_of(0, 1)) == {"0": 4}, "the new publisher's block")
    assert scores(http, model, tokens_of(100, 1)) == {}
    assert listener(http, 1)["last_sequence"] == 0


def test_many_threads_may_publish(http, publisher, model):
    made = publisher()
    register(http, model, made)

    def work(thread):
        for turn in range(200):
            name = thread * 1000 + turn
            store(made, [name], tokens_of(name * 10, 1))
            if turn % 2:
                made.publish_removed([name])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(1, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    applied(http, made)
    for thread in range(1, 6):
        for turn in range(200):
            held = scores(http, model, tokens_of((thread * 1000 + turn) * 10, 1))
            assert held == ({} if turn % 2 else {"0": 4})
    assert made.stats()["stored_blocks_total"] == 1000
    assert made.stats()["pending_events"] == 0


def test_it_needs_no_event_loop_and_does_not_mind_one(http, publisher, model):
    async def engine():
        made = publisher()
        store(made, [1], tokens_of(0, 1))
        return made

    made = asyncio.run(engine())
    register(http, model, made)
    applied(http, made)
    assert scores(http, model, tokens_of(0, 1)) == {"0": 4}


def test_a_block_of_another_size_drops_the_rest_of_the_call(http, publisher, model, caplog):
    made = publisher()
    register(http, model, made)
    tokens = tokens_of(0, 3)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            made.publish_stored(tokens[:11], [SIZE, 3, SIZE], [1, 2, 3])
    assert len(caplog.records) == 3
    assert "num_block_tokens[1] is 3 and kv_block_size 4: dropped 2 blocks" in caplog.text
    applied(http, made)
    assert scores(http, model, tokens) == {"0": 4}
    assert made.stats()["dropped_blocks_total"] == 10
    assert made.stats()["stored_blocks_total"] == 5


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"token_ids": [0, 1, -1, 3]}, "token_ids[2] must be an integer in 0..=4294967295, got -1"),
        ({"token_ids": [0, 1, 2, 1 << 32]}, "token_ids[3] must be an integer in"),
        (
            {"token_ids": [0, "a", 2, 3]},
            "token_ids[1] must be an integer in 0..=4294967295, got 'a'",
        ),
        (
            {"token_ids": "abcd"},
            "token_ids must be a list, an array or a buffer of integers, got str",
        ),
        ({"token_ids": [0]}, "num_block_tokens adds up to 4 tokens, token_ids has 1"),
        ({"num_block_tokens": []}, "one entry for each of the 1 block_hashes, got 0"),
        ({"block_hashes": [1 << 64]}, "block_hashes[0] must be an integer in 64 bits"),
        ({"block_hashes": [True]}, "block_hashes[0] must be an integer in 64 bits, got True"),
        ({"parent_hash": 1.5}, "parent_hash[0] must be an integer in 64 bits, got 1.5"),
        ({"lora_id": -1}, "lora_id must be an integer in 0..=9223372036854775807, got -1"),
        ({"lora_name": 5}, "lora_name must be text, got 5"),
        ({"cache_salt": "x" * 70_000}, "cache_salt may have 65536 bytes, got 70000"),
        ({"block_mm_infos": []}, "block_mm_infos must have one entry for each of the 1 blocks"),
        ({"block_mm_infos": [{"mm": 1}]}, "block_mm_infos[0] must be None or"),
        ({"block_mm_infos": [media(-1, 0, 4)]}, "block_mm_infos[0] must be None or"),
        (
            {"block_mm_infos": [media(7, 5, 7)]},
            "block_mm_infos[0].mm_objects[0].offsets must be [start, end) with start below the",
        ),
        ({"event_id": -1}, "event_id must be in 0..="),
    ],
)
def test_a_wrong_argument_is_named_and_nothing_published(publisher, changes, wanted):
    made = publisher()
    call = {"token_ids": [0, 1, 2, 3], "num_block_tokens": [4], "block_hashes": [1], **changes}
    with pytest.raises(InvalidArgumentError) as caught:
        made.publish_stored(**call)
    assert wanted in str(caught.value)
    for hashes, text in (([None], r"block_hashes\[0\]"), (5, "block_hashes must be a list")):
        with pytest.raises(InvalidArgumentError, match=text):
            made.publish_removed(hashes)
    assert made.stats()["events_total"] == 0


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"kv_block_size": 0}, "kv_block_size must be in 1..=4294967295, got 0"),
        ({"dp_rank": -1}, "dp_rank must be in 0..="),
        ({"worker_id": 1 << 64}, "worker_id must be in 0..="),
        ({"port": 65536}, "port must be in 0..=65535, got 65536"),
        ({"tick_ms": float("nan")}, "tick_ms must be in 0..=1000, got nan"),
        ({"ring_batches": 0}, "ring_batches must be in 1..="),
        ({"zmq_endpoint": "5557"}, "zmq_endpoint must look like tcp://host:port, got '5557'"),
        (
            {"zmq_endpoint": "ipc:///tmp/events", "zmq_replay_endpoint": "tcp://127.0.0.1"},
            "zmq_replay_endpoint must look like tcp://host:port, got 'tcp://127.0.0.1'",
        ),
    ],
)
def test_a_wrong_setting_is_named(settings, wanted):
    with pytest.raises(InvalidArgumentError) as caught:
        KvEventPublisher(None, **{"kv_block_size": 4, **settings})
    assert wanted in str(caught.value)


def test_a_port_that_is_taken_is_named(publisher):
    taken = int(publisher().endpoint.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"replay_port: can't bind {taken}"):
        publisher(replay_port=taken)
    with pytest.raises(ConfigError, match=r"host: can't bind 192\.0\.2\.1"):
        publisher(host="192.0.2.1")


def test_after_shutdown_a_call_says_so(publisher):
    made = publisher()
    made.shutdown()
    made.shutdown()
    for call in (lambda: store(made, [1], tokens_of(0, 1)), made.publish_cleared):
        with pytest.raises(ClosedError, match="shut down"):
            call()


def test_what_was_published_before_shutdown_is_sent(publisher, zmq_socket):
    made = publisher(tick_ms=1000)
    subscriber = subscribed(made, zmq_socket)
    store(made, [1], tokens_of(0, 1))
    made.shutdown()
    assert received(subscriber)[1][0]["block_hashes"] == [1]


def test_a_queue_that_is_full_makes_callers_wait_and_loses_nothing():
    stream = EventStream(pending_bytes_max=1, tick_ms=0)
    try:
        for _ in range(200):
            stream.outbox.put([b"\xc0" * 100])
        assert stream.flush()
        assert stream.stats()["events_total"] == 200
    finally:
        stream.close()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_process_is_told(publisher):
    made = publisher()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            made.publish_cleared()
        except ClosedError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as answer:  # noqa: PTH123 - a pipe
        assert b"not to a fork" in answer.read()
    os.waitpid(child, 0)
