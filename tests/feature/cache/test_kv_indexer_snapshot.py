"""KvIndexer.save_snapshot and load_snapshot; rust/core/tests/all/snapshot.rs tests the format."""

from __future__ import annotations

import os
import threading
import time

import pytest

from kvflash import InvalidArgumentError, KvIndexer, compute_block_hash_for_seq

SIZE = 4
IDS = list(range(100, 116))
LOCALS = compute_block_hash_for_seq(IDS, SIZE)


def filled():
    """Worker 1 holds four blocks, 2:3 two of them on its host, with a hole, 7 knows an adapter."""
    index = KvIndexer(SIZE)
    index.store(1, [11, 12, 13, 14], LOCALS)
    index.store(2, [21, 22, 23], LOCALS[:3], dp_rank=3, tier="host_pinned")
    index.remove(2, [22], dp_rank=3, tier="host_pinned")
    salted = compute_block_hash_for_seq(IDS, SIZE, lora_name="french")
    index.store(7, [71, 72, 73, 74], salted, lora_name="french")
    return index


def held(index):
    return sorted(index.dump_tree_as_events())


def test_what_was_saved_is_loaded_and_goes_on(tmp_path):
    index, path = filled(), tmp_path / "index.snap"
    before = time.time()
    saved = index.save_snapshot(path)
    assert saved.pop("bytes") == path.stat().st_size
    assert saved["workers"] == 3
    assert [one.name for one in tmp_path.iterdir()] == [path.name]

    fresh = KvIndexer(SIZE)
    loaded = fresh.load_snapshot(str(path))
    assert abs(loaded.pop("created_ms") / 1_000 - before) < 60
    assert loaded == {"workers": 3, "blocks": 10, "lost": [], "cut": False}
    assert held(fresh) == held(index)
    assert len(held(fresh)) >= 3
    assert fresh.find_matches_for_request(IDS).scores == {(1, 0): 4}
    assert fresh.find_matches_for_request(IDS, lora_name="french").scores == {(7, 0): 4}
    # The hole is filled under the names that were saved.
    fresh.store(2, [22], LOCALS[1:2], 21, dp_rank=3)
    assert fresh.remove(1, [14]) == 1


def test_a_damaged_part_costs_its_worker_only(tmp_path):
    index, path = filled(), tmp_path / "index.snap"
    index.save_snapshot(path)
    whole = path.read_bytes()

    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    fresh = KvIndexer(SIZE)
    loaded = fresh.load_snapshot(path)
    assert (loaded["workers"], loaded["blocks"], loaded["cut"]) == (2, 6, False)
    [(worker, rank, cause)] = loaded["lost"]
    assert (worker, rank) == (7, 0)
    assert "checksum is 0x" in cause
    assert fresh.workers() == [(1, 0), (2, 3)]

    path.write_bytes(whole[:-1])
    loaded = KvIndexer(SIZE).load_snapshot(path)
    assert (loaded["workers"], loaded["cut"]) == (2, True)
    assert loaded["lost"] == [(7, 0, "the snapshot is truncated")]

    # A worker's own events are newer than a snapshot; restoring respects the limit.
    path.write_bytes(whole)
    fresh = KvIndexer(SIZE, max_blocks=3)
    fresh.store(1, [19], LOCALS[:1])
    lost = {(worker, rank): cause for worker, rank, cause in fresh.load_snapshot(path)["lost"]}
    assert lost[1, 0] == "the worker already holds 1 blocks"
    assert lost[7, 0] == "the index refused: no more blocks"
    assert fresh.stats()["memberships"] <= 3


def test_a_file_that_does_not_fit_is_refused_by_field(tmp_path):
    path = tmp_path / "index.snap"
    filled().save_snapshot(path)
    whole = path.read_bytes()
    other = KvIndexer(SIZE * 2)
    with pytest.raises(InvalidArgumentError) as caught:
        other.load_snapshot(path)
    assert str(caught.value) == f"path {path}: snapshot's block size: expected 8, found 4"
    for damaged, word in (
        (b"KVFSNAP\0" + whole[8:], r"begins with KVFSNAP\\x00, not with kvfsnap\\x00; name a file"),
        (whole[:8] + b"\x09" + whole[9:], "version"),
        (whole[:33] + b"\xff" + whole[34:], "checksum"),
        (whole[:20], "truncated within its header"),
        (b"", "truncated within its header"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(InvalidArgumentError, match=word):
            other.load_snapshot(path)
    assert other.workers() == []


def test_what_the_file_system_says_is_said(tmp_path):
    index = filled()
    missing = tmp_path / "missing" / "index.snap"
    for call in (index.load_snapshot, index.save_snapshot):
        with pytest.raises(FileNotFoundError) as caught:
            call(missing)
        assert "os error" not in str(caught.value)
    with pytest.raises(FileNotFoundError) as caught:
        index.load_snapshot(missing)
    assert caught.value.filename == str(missing)
    with pytest.raises(IsADirectoryError):
        index.load_snapshot(tmp_path)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(InvalidArgumentError, match="exists and is not a file"):
        index.save_snapshot(pipe)
    assert pipe.is_fifo()
    with pytest.raises(InvalidArgumentError, match="does not name a file"):
        index.save_snapshot("/")


def test_snapshots_are_taken_while_the_index_serves(tmp_path):
    index, path, stop = KvIndexer(SIZE, count_mode="set"), tmp_path / "index.snap", False
    index.store(1, [11, 12, 13, 14], LOCALS)
    written = 0

    def write():
        nonlocal written
        while not stop:
            index.store(2, [21, 22], LOCALS[:2])
            index.remove(2, [22, 21])
            written += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        rounds = 0
        deadline = time.monotonic() + 30
        while (rounds < 20 or written < 100) and time.monotonic() < deadline:
            index.save_snapshot(path)
            fresh = KvIndexer(SIZE, count_mode="set")
            loaded = fresh.load_snapshot(path)
            assert loaded["lost"] == []
            scores = fresh.find_matches(LOCALS).scores
            assert scores.pop((1, 0)) == 4
            # Between two calls of the writer: both blocks, none, or the first.
            assert scores.get((2, 0), 0) in (0, 1, 2)
            rounds += 1
    finally:
        stop = True
        writer.join()
    assert rounds >= 20
    assert written >= 100
