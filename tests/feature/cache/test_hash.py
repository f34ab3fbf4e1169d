"""Block hashes from Python: all kinds of integers hash alike, anything else is refused."""

from __future__ import annotations

import ctypes
import json
import re
import subprocess
import sys
import threading
from array import array

import numpy as np
import pytest

from kvflash import (
    InvalidArgumentError,
    compute_block_hash_array,
    compute_block_hash_for_seq,
    compute_sequence_hashes,
)
from service import VECTORS

VECTOR = json.loads((VECTORS / "hash.json").read_text())
U32_MAX = 2**32 - 1
I32_MAX = 2**31 - 1


def shown(value: object) -> str:
    """Name a case without its address, alike in every process."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


# Each makes the same token ids in another form; ids up to 2**31 - 1 fit into all of them.
FORMS = {
    "list": list,
    "tuple": tuple,
    "array('I')": lambda ids: array("I", ids),
    "array('i')": lambda ids: array("i", ids),
    "array('l')": lambda ids: array("l", ids),
    "array('L')": lambda ids: array("L", ids),
    "array('q')": lambda ids: array("q", ids),
    "array('Q')": lambda ids: array("Q", ids),
    "uint32": lambda ids: np.array(ids, dtype=np.uint32),
    "int32": lambda ids: np.array(ids, dtype=np.int32),
    "int64": lambda ids: np.array(ids, dtype=np.int64),
    "uint64": lambda ids: np.array(ids, dtype=np.uint64),
    "big-endian uint32": lambda ids: np.array(ids, dtype=">u4"),
    "big-endian int64": lambda ids: np.array(ids, dtype=">i8"),
    "little-endian uint32": lambda ids: np.array(ids, dtype="<u4"),
    "object array": lambda ids: np.array(ids, dtype=object),
    "memoryview of array": lambda ids: memoryview(array("I", ids)),
    "memoryview of uint32": lambda ids: memoryview(np.array(ids, dtype=np.uint32)),
    "memoryview cast": lambda ids: memoryview(array("I", ids).tobytes()).cast("I"),
    "ctypes": lambda ids: (ctypes.c_uint32 * len(ids))(*ids),
    "every second uint32": lambda ids: np.repeat(np.array(ids, dtype=np.uint32), 2)[::2],
    "every second int64": lambda ids: np.repeat(np.array(ids, dtype=np.int64), 2)[::2],
    "reversed view": lambda ids: np.array(ids[::-1], dtype=np.uint32)[::-1],
    "memoryview slice": lambda ids: memoryview(array("I", [i for i in ids for _ in "12"]))[::2],
    "read-only": lambda ids: np.frombuffer(array("I", ids).tobytes(), dtype=np.uint32),
    "numpy scalars": lambda ids: [np.int64(i) for i in ids],
    "unaligned": lambda ids: np.frombuffer(b"x" + array("I", ids).tobytes(), np.uint8)[1:].view(
        np.uint32
    ),
}


def prompts():
    for case in VECTOR["prompts"]:
        ids = case.get("token_ids") or [case["token_id"]] * case["tokens"]
        identity = {name: case[name] for name in ("lora_name", "cache_salt") if name in case}
        if case.get("eagle"):
            identity["is_eagle"] = True
        yield ids, case["block_size"], identity, [int(h) for h in case["local"]], case


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_recorded_hashes(form):
    make = FORMS[form]
    seen = 0
    for ids, block_size, identity, wanted, _ in prompts():
        assert compute_block_hash_for_seq(make(ids), block_size, **identity) == wanted
        seen += len(wanted)
    assert seen >= 13


@pytest.mark.parametrize("form", sorted(set(FORMS) - {"array('i')", "int32"}))
def test_ids_above_31_bits_are_the_same_in_every_form(form):
    ids = [U32_MAX, I32_MAX + 1, I32_MAX, 0]
    assert compute_block_hash_for_seq(FORMS[form](ids), 2) == compute_block_hash_for_seq(ids, 2)


def test_narrow_integers_are_ids_too():
    ids = [1, 2, 3, 4, 5, 6, 7, 8]
    wanted = compute_block_hash_for_seq(ids, 4)
    for dtype in (np.uint8, np.int8, np.uint16, np.int16):
        assert compute_block_hash_for_seq(np.array(ids, dtype=dtype), 4) == wanted, dtype
    assert compute_block_hash_for_seq(range(1, 9), 4) == wanted
    assert compute_block_hash_for_seq(range(0, 9)[1:], 4) == wanted


def test_recorded_sequence_hashes():
    recorded = [(local, case["sequence"]) for *_, local, case in prompts() if "sequence" in case]
    assert len(recorded) >= 7
    for local, sequence in recorded:
        for make in (list, tuple, lambda h: array("Q", h), lambda h: np.array(h, np.uint64)):
            assert compute_sequence_hashes(make(local)) == [int(h) for h in sequence]
    # Engines in Python publish signed hashes: the bits count.
    hashes = [2**64 - 1, 2**63, 5]
    signed = [h - 2**64 if h >= 2**63 else h for h in hashes]
    wanted = compute_sequence_hashes(hashes)
    assert compute_sequence_hashes(signed) == wanted
    assert compute_sequence_hashes(array("q", signed)) == wanted
    assert compute_sequence_hashes(np.array(signed, dtype=np.int64)) == wanted
    assert compute_sequence_hashes(np.array(hashes, dtype=">u8")) == wanted
    assert compute_sequence_hashes([]) == []


def test_an_incomplete_block_has_no_hash():
    seen = 0
    for case in VECTOR["block_counts"]:
        for tokens, blocks in zip(case["tokens"], case["blocks"], strict=True):
            ids = list(range(tokens))
            hashes = compute_block_hash_for_seq(ids, case["block_size"])
            assert len(hashes) == blocks
            eagle = compute_block_hash_for_seq(ids, case["block_size"], is_eagle=True)
            assert len(eagle) == (tokens - 1) // case["block_size"]
            seen += 1
    assert seen == 6


@pytest.mark.parametrize("form", sorted(set(FORMS) - {"unaligned"}))
def test_nothing_has_no_hashes(form):
    assert compute_block_hash_for_seq(FORMS[form]([]), 4) == []


def test_an_empty_name_is_no_name_and_names_do_not_mix():
    ids = [1, 2, 3, 4]
    plain = compute_block_hash_for_seq(ids, 4)
    assert compute_block_hash_for_seq(ids, 4, lora_name="", cache_salt="") == plain
    assert compute_block_hash_for_seq(ids, 4, lora_name=None, cache_salt=None) == plain
    different = {
        tuple(compute_block_hash_for_seq(ids, 4, **identity))
        for identity in (
            {},
            {"lora_name": "a"},
            {"cache_salt": "a"},
            {"lora_name": "a", "cache_salt": "b"},
            {"lora_name": "b", "cache_salt": "a"},
        )
    }
    assert len(different) == 5


@pytest.mark.parametrize(
    ("form", "value"),
    [
        (form, value)
        for form, values in {
            "list": (-1, 2**32, 2**63, 2**64, -(2**70), 10**30),
            "tuple": (-1, 2**32, 2**64),
            "array('i')": (-1,),
            "array('q')": (-1, 2**32, -(2**63)),
            "array('Q')": (2**32, 2**64 - 1),
            "int32": (-1,),
            "int64": (-1, 2**32),
            "uint64": (2**32,),
            "big-endian int64": (-5, 2**32),
            "every second int64": (-5, 2**32),
            "object array": (-1, 2**70),
        }.items()
        for value in values
    ],
)
def test_an_id_outside_u32_is_named_by_index_and_value(form, value):
    ids = [1, 2, 3, value, 5, 6, 7, 8]
    with pytest.raises(InvalidArgumentError) as caught:
        compute_block_hash_for_seq(FORMS[form](ids), 4)
    assert "tokens[3]" in str(caught.value)
    assert str(value) in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    "wrong",
    [True, False, 1.0, 1.5, "1", b"1", None, [1], np.float32(1.0), np.bool_(True), object()],
    ids=shown,
)
def test_an_element_that_is_no_integer_is_named_by_index(wrong):
    with pytest.raises(InvalidArgumentError, match=r"tokens\[2\] must be an integer"):
        compute_block_hash_for_seq([1, 2, wrong, 4], 4)
    with pytest.raises(InvalidArgumentError, match=r"tokens\[2\] must be an integer"):
        compute_block_hash_for_seq((1, 2, wrong, 4), 4)


@pytest.mark.parametrize(
    "wrong",
    [
        np.array([1.0, 2.0]),
        np.array([1.0, 2.0], dtype=np.float32),
        np.array([True, False]),
        np.array([1 + 0j, 2]),
        np.array(["a", "b"]),
        np.array([1, 2], dtype="datetime64[s]"),
        array("d", [1.0, 2.0]),
        array("f", [1.0, 2.0]),
        memoryview(array("d", [1.0])),
        [[1, 2], [3, 4]],
    ],
    ids=shown,
)
def test_arrays_of_no_integers_are_refused(wrong):
    with pytest.raises(InvalidArgumentError, match=r"tokens\[0\] must be an integer"):
        compute_block_hash_for_seq(wrong, 2)


@pytest.mark.parametrize("wrong", [None, 5, 1.5, object(), len], ids=shown)
def test_what_holds_no_integers_is_refused_by_type(wrong):
    with pytest.raises(InvalidArgumentError) as caught:
        compute_block_hash_for_seq(wrong, 2)
    assert "tokens must be a list, an array or a buffer of integers" in str(caught.value)
    assert type(wrong).__name__ in str(caught.value)


def test_an_empty_text_is_no_list_of_ids():
    with pytest.raises(InvalidArgumentError):
        compute_block_hash_for_seq("", 2)


def test_a_matrix_is_refused():
    batch = np.arange(8, dtype=np.uint32).reshape(2, 4)
    with pytest.raises(InvalidArgumentError):
        compute_block_hash_for_seq(batch, 4)


def test_a_matrix_with_gaps_is_refused():
    batch = np.arange(16, dtype=np.uint32).reshape(2, 8)[:, ::2]
    with pytest.raises(InvalidArgumentError):
        compute_block_hash_for_seq(batch, 4)


@pytest.mark.parametrize("wrong", ["12", b"12", bytearray(b"12")], ids=shown)
def test_text_and_raw_bytes_are_refused(wrong):
    with pytest.raises(InvalidArgumentError, match="tokens must be a list, an array or a buffer"):
        compute_block_hash_for_seq(wrong, 1)


def test_buffers_of_bytes_are_ids_of_eight_bits():
    raw = bytes([1, 2, 3, 4])
    wanted = compute_block_hash_for_seq([1, 2, 3, 4], 4)
    for form in (memoryview(raw), np.frombuffer(raw, np.uint8)):
        assert compute_block_hash_for_seq(form, 4) == wanted


@pytest.mark.parametrize("block_size", [0, -1, 2**32, 2**62])
def test_a_block_size_outside_its_range_is_refused_with_the_limit(block_size):
    with pytest.raises(InvalidArgumentError, match=f"1..=4294967295, got {block_size}"):
        compute_block_hash_for_seq([1, 2], block_size)


def test_a_block_size_of_more_than_64_bits_is_refused_alike():
    with pytest.raises(InvalidArgumentError):
        compute_block_hash_for_seq([1, 2], 2**64)


def test_a_block_size_that_is_no_integer_is_refused():
    for wrong in ("4", 4.0, None):
        with pytest.raises(InvalidArgumentError, match="kv_block_size must be a whole number"):
            compute_block_hash_for_seq([1, 2], wrong)


def test_hashes_outside_64_bits_are_refused():
    for wrong in (2**64, -(2**63) - 1):
        with pytest.raises(InvalidArgumentError) as caught:
            compute_sequence_hashes([1, wrong])
        assert "block_hashes[1]" in str(caught.value)
        assert str(wrong) in str(caught.value)


def test_an_iterable_without_a_length_will_do():
    assert compute_block_hash_for_seq((i for i in range(8)), 4) == compute_block_hash_for_seq(
        list(range(8)), 4
    )


def test_the_error_of_an_iterable_passes_through():
    def broken():
        yield 1
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        compute_block_hash_for_seq(broken(), 4)


def test_a_list_that_shrinks_while_it_is_read():
    ids = list(range(100))

    class Shrinks:
        def __index__(self):
            ids.clear()
            return 1

    ids[10] = Shrinks()
    with pytest.raises((InvalidArgumentError, IndexError)):
        compute_block_hash_for_seq(ids, 4)


def test_a_buffer_is_released():
    data = bytearray(array("I", range(64)).tobytes())
    view = memoryview(data).cast("I")
    compute_block_hash_for_seq(view, 16)
    with pytest.raises(InvalidArgumentError):
        compute_block_hash_for_seq(memoryview(array("q", [-1])), 1)
    view.release()
    data.extend(b"more")  # BufferError while anything exports it


GROWTH = r"""
import mmap, re, sys, tracemalloc
from pathlib import Path
import numpy as np
from kvflash import compute_block_hash_for_seq

def peak():
    # Not ru_maxrss, which begins with the parent's.
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])

length = 64 << 20
# Pages that nobody has touched: reading maps the one zero page, a copy fills memory.
pages = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
pages.madvise(mmap.MADV_NOHUGEPAGE)
form = {
    "memoryview": lambda: memoryview(pages).cast("I"),
    "uint32": lambda: np.frombuffer(pages, dtype=np.uint32),
    "int32": lambda: np.frombuffer(pages, dtype=np.int32),
}[sys.argv[1]]()
compute_block_hash_for_seq(form[:16], 16)
tracemalloc.start()
before = peak()
assert len(compute_block_hash_for_seq(form, length // 4)) == 1
print(peak() - before, tracemalloc.get_traced_memory()[1])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("form", "is_copied"), [("memoryview", 0), ("uint32", 0), ("int32", 1)])
def test_unsigned_32_bits_are_hashed_in_place(form, is_copied):
    """In a process of its own, as a peak never falls. The copied form shows that a copy is seen."""
    command = [sys.executable, "-c", GROWTH, form]
    out = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    grown_kib, traced_bytes = map(int, out.split())
    assert traced_bytes < 1 << 20
    assert (grown_kib > 48 << 10) == bool(is_copied), f"{grown_kib} KiB more resident"
    assert is_copied or grown_kib < 8 << 10


def test_many_threads_hash_at_once():
    prompts_of = {seed: np.random.default_rng(seed).integers(0, 2**32, 4096) for seed in range(8)}
    alone = {seed: compute_block_hash_for_seq(ids, 16) for seed, ids in prompts_of.items()}
    wrong, barrier = [], threading.Barrier(8)

    def work(seed):
        barrier.wait()
        forms = (
            prompts_of[seed],
            prompts_of[seed].tolist(),
            prompts_of[seed].astype(np.uint32),
        )
        for turn in range(60):
            if compute_block_hash_for_seq(forms[turn % 3], 16) != alone[seed]:
                wrong.append((seed, turn))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in prompts_of]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(threads) == 8
    assert wrong == []


def test_the_gil_is_free_while_a_buffer_is_hashed():
    """Other threads get turns during one long call, which they would not if it held the GIL."""
    ids = np.zeros(64 << 20, dtype=np.uint32)
    turns, go, is_over = 0, threading.Event(), threading.Event()

    def count():
        nonlocal turns
        go.wait()
        while not is_over.is_set():
            turns += 1

    thread = threading.Thread(target=count)
    thread.start()
    try:
        go.set()
        before = turns
        compute_block_hash_for_seq(ids, len(ids))
        during = turns - before
    finally:
        is_over.set()
        thread.join()
    assert during > 0


@pytest.mark.parametrize("form", FORMS)
def test_hashes_into_memory_are_the_hashes_of_the_list(form):
    room = np.zeros(4_096, np.uint64)
    seen = 0
    for ids, block_size, identity, wanted, _ in prompts():
        given = FORMS[form](ids)
        hashes = compute_block_hash_array(given, block_size, **identity)
        assert hashes.tolist() == wanted
        assert (hashes.format, hashes.itemsize, hashes.readonly) == ("Q", 8, True)
        assert np.asarray(hashes).dtype == np.uint64
        written = compute_block_hash_array(given, block_size, out=room, **identity)
        assert written.tolist() == room[: len(wanted)].tolist() == wanted
        seen += len(wanted)
    assert seen >= 13


@pytest.mark.parametrize("block_size", [1, 16, 59, 60, 61, 64, 128, 2048])
def test_long_blocks_are_hashed_alike_alone_and_in_a_row(block_size):
    """XXH3 changes its way at 240 bytes, and the row has a shortcut there."""
    ids = np.random.default_rng(block_size).integers(0, 2**32, 5 * block_size + 1, dtype=np.uint32)
    for identity in ({}, {"cache_salt": "s"}, {"is_eagle": True}):
        extra = 1 if identity.get("is_eagle") else 0
        wanted = [
            compute_block_hash_array(ids[at : at + block_size + extra], block_size, **identity)[0]
            for at in range(0, 5 * block_size, block_size)
        ]
        row = ids[: 5 * block_size + extra]
        assert compute_block_hash_array(row, block_size, **identity).tolist() == wanted
        assert compute_block_hash_for_seq(row, block_size, **identity) == wanted


def test_the_callers_memory_is_used_as_far_as_needed():
    out = array("Q", [7] * 4)
    view = compute_block_hash_array([1, 2, 3, 4], 2, out=out)
    assert (len(view), out[2:]) == (2, array("Q", [7, 7]))
    out[0] = 5
    assert view[0] == 5
    assert len(compute_block_hash_array([], 2, out=out)) == 0
    assert len(compute_block_hash_array([], 2)) == 0


def test_memory_that_will_not_do_is_refused():
    ids = np.arange(8, dtype=np.uint32)
    for wrong, why in (
        (np.zeros(1, np.uint64), "out must have room for 2 hashes, got 1"),
        (np.zeros(2, np.int64), "out must be a writable flat buffer of uint64"),
        (np.zeros(4, np.uint64)[::2], "out must be a writable flat buffer of uint64"),
        (bytes(16), "out must be a writable flat buffer of uint64"),
        ([0, 0], "out must be a writable flat buffer of uint64"),
        (ids.view(np.uint64), "out must not share memory with the tokens"),
        (ids.view(np.uint64)[1:], "out must not share memory with the tokens"),
    ):
        with pytest.raises(InvalidArgumentError, match=why):
            compute_block_hash_array(ids, 4, out=wrong)
    assert ids.tolist() == list(range(8))
    with pytest.raises(InvalidArgumentError, match=r"tokens\[1\]"):
        compute_block_hash_array([1, -1], 1)
    with pytest.raises(InvalidArgumentError, match="kv_block_size"):
        compute_block_hash_array([1, 2], 0)


def test_two_prompts_of_one_length_never_share_a_key():
    """A bug of other projects: a key derived from the number of tokens."""
    prompts = [[start + n for n in range(64)] for start in range(0, 64_000, 64)]
    keys = {compute_block_hash_for_seq(tokens, 16)[-1] for tokens in prompts}
    sequences = {compute_sequence_hashes(compute_block_hash_for_seq(p, 16))[-1] for p in prompts}
    assert len(keys) == len(sequences) == len(prompts)


def picture(offset=5, length=2, identifier="a"):
    return [{"identifier": identifier, "offset": offset, "length": length}]


def test_pictures_and_their_places_are_part_of_the_hash():
    ids = [7] * 12
    plain = compute_block_hash_for_seq(ids, 4)
    assert compute_block_hash_for_seq(ids, 4, mm=[], embeds=None) == plain
    found = compute_block_hash_for_seq(ids, 4, mm=picture())
    assert found == compute_block_hash_for_seq(ids, 4, mm=tuple(picture()))
    assert (found[0], found[2]) == (plain[0], plain[2])
    others = (picture(offset=6, length=1), picture(identifier="b"), [])
    assert all(compute_block_hash_for_seq(ids, 4, mm=other)[1] != found[1] for other in others)
    assert compute_block_hash_for_seq(ids, 4, mm=picture(), cache_salt="s")[1] != found[1]
    # In any order.
    two = [*picture(offset=9), *picture(offset=1)]
    assert compute_block_hash_for_seq(ids, 4, mm=two) == compute_block_hash_for_seq(
        ids, 4, mm=two[::-1]
    )


def test_embeddings_are_part_of_the_hash():
    ids = [7] * 12
    found = compute_block_hash_for_seq(ids, 4, embeds=["00fF", "10", "11"])
    assert found == compute_block_hash_for_seq(ids, 4, embeds=[b"\0\xff", b"\x10", b"\x11"])
    other = compute_block_hash_for_seq(ids, 4, embeds=["00ff", "12", "11"])
    assert (found[0], found[2]) == (other[0], other[2])
    assert found[1] != other[1]
    # It ends before the first block without a digest.
    assert compute_block_hash_for_seq(ids, 4, embeds=["00ff"]) == found[:1]


def test_arrays_have_the_hashes_of_pictures_and_embeddings():
    ids = list(range(12))
    for keys in ({"mm": picture()}, {"embeds": ["00", "01"]}, {"mm": picture(), "embeds": ["00"]}):
        wanted = compute_block_hash_for_seq(ids, 4, **keys)
        assert list(compute_block_hash_array(ids, 4, **keys)) == wanted
        room = np.zeros(3, np.uint64)
        written = compute_block_hash_array(ids, 4, out=room, **keys)
        assert list(written) == wanted
        assert list(room[: len(wanted)]) == wanted
    with pytest.raises(InvalidArgumentError, match="out must have room for 3 hashes, got 2"):
        compute_block_hash_array(ids, 4, out=np.zeros(2, np.uint64), mm=picture())


@pytest.mark.parametrize("hashes_of", [compute_block_hash_for_seq, compute_block_hash_array])
@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({"mm": 5}, "mm must be a list of {identifier, offset, length}, got 5"),
        ({"mm": "a"}, "mm must be a list of {identifier, offset, length}, got a"),
        ({"mm": picture()[0]}, "mm must be a list of {identifier, offset, length}, got {"),
        ({"mm": [5]}, "mm[0] must be a mapping with identifier, offset and length, got 5"),
        ({"mm": [{"identifier": "a"}]}, "mm[0] is missing the field offset"),
        ({"mm": picture(identifier="")}, "mm[0].identifier must have 1 to 1024 bytes, got 0"),
        ({"mm": picture(identifier="a" * 1025)}, "must have 1 to 1024 bytes, got 1025"),
        ({"mm": picture(identifier=5)}, "mm[0].identifier must be text, got 5"),
        ({"mm": picture(offset=-1)}, "mm[0].offset must be a whole number in 0..=4294967295, got"),
        ({"mm": picture(length=1.5)}, "mm[0].length must be a whole number in 0..=4294967295, got"),
        ({"mm": picture(offset=2**32 - 1)}, "mm[0] must end within 4294967295 tokens"),
        ({"mm": picture() * 65_537}, "mm may have at most 65536 items, got 65537"),
        ({"embeds": "00"}, "embeds must be a list of digests, got 00"),
        ({"embeds": ["00", "0"]}, "embeds[1] must be 1 to 1024 bytes in hexadecimal digits"),
        ({"embeds": [b""]}, "embeds[0] must have 1 to 1024 bytes, got 0"),
        ({"embeds": [5]}, "embeds[0] must be bytes or text in hexadecimal digits, got 5"),
        ({"embeds": ["00"] * 65_537}, "embeds may have at most 65536 digests, got 65537"),
        ({"mm": picture(), "is_eagle": True}, "mm and embeds have no EAGLE hashes"),
    ],
)
def test_wrong_items_are_refused_by_name(hashes_of, keys, wanted):
    with pytest.raises(InvalidArgumentError) as error:
        hashes_of([1, 2, 3, 4], 4, **keys)
    assert wanted in str(error.value)
