"""The paged KV cache of one engine, without clock, sockets and randomness, and its block hashes.

A block is *partial* (reserved by one request, without a hash), *active* (full, found by its hash,
used by one or more requests) or *inactive* (full, unused, evicted when room is needed).

Hashes are chained: each covers its tokens and, through its parent, all before. Adapter and cache
salt are in the root of the chain, so that equal tokens of others never match.
"""

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import takewhile

TOKEN_ID_MAX = 2**32 - 1


def root_hash(lora_name: str | None, cache_salt: str | None) -> int:
    """Hash (u64) that stands in for the parent of a first block; equal only for equal arguments."""
    digest = blake2b(digest_size=8, person=b"root")
    for part in (lora_name, cache_salt):
        # The length before the bytes keeps ("ab", "c") apart from ("a", "bc"), and -1 None from "".
        data = b"" if part is None else part.encode()
        digest.update((-1 if part is None else len(data)).to_bytes(8, "big", signed=True) + data)
    return int.from_bytes(digest.digest(), "big")


def block_hash(parent: int, token_ids: Sequence[int]) -> int:
    """Hash (u64) of one full block after its parent, or after `root_hash` for a first block."""
    data = parent.to_bytes(8, "big") + _token_bytes(token_ids)
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big")


def extend_hashes(hashes: list[int], root: int, token_ids: Sequence[int], block_size: int) -> None:
    """Append the hashes of the full blocks of `token_ids` that `hashes` does not have yet."""
    for start in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        parent = hashes[-1] if hashes else root
        hashes.append(block_hash(parent, token_ids[start : start + block_size]))


def output_seed(lora_name: str | None, token_ids: Sequence[int]) -> int:
    """Seed of a prompt's output: equal for equal prompts, independent of salts."""
    root = root_hash(lora_name, None)
    digest = blake2b(root.to_bytes(8, "big"), digest_size=8, person=b"output")
    digest.update(_token_bytes(token_ids))
    return int.from_bytes(digest.digest(), "big")


def _token_bytes(token_ids: Sequence[int]) -> bytes:
    # Native byte order: hashes are compared only within the engine that made them.
    return array("I", token_ids).tobytes()


class BlockManager:
    """Block accounting with prefix caching and LRU eviction.

    For every cached block its parent is cached too, as long as callers use and dereference whole
    prefixes: a tail is freed before its prefix, so it is evicted first. Every method costs O(blocks
    named in the call).
    """

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self.partial_blocks = 0
        self._active: dict[int, int] = {}
        # Insertion order is the order of eviction: dicts keep it, and the first-in is next(iter()).
        self._inactive: dict[int, None] = {}
        self._evicted: list[int] = []

    @property
    def used_blocks(self) -> int:
        """Blocks that a request holds: active and partial. Never above the capacity."""
        return len(self._active) + self.partial_blocks

    def is_cached(self, block_hash: int) -> bool:
        """Whether a full block of this hash exists, active or inactive."""
        return block_hash in self._active or block_hash in self._inactive

    def cached_prefix(self, block_hashes: Iterable[int]) -> int:
        return sum(1 for _ in takewhile(self.is_cached, block_hashes))

    def use(
        self, block_hashes: Sequence[int], partial: int = 0, *, most: int | None = None
    ) -> bool:
        """Take a reference on every hash and reserve partial blocks: all of it or nothing.

        An active block gets one more reference, an inactive one is revived, an unknown one is
        allocated as full and active. If the cache is full, inactive blocks are evicted, least
        recently used first, but never one named in this call. Returns False, with nothing changed,
        if more than ``most`` blocks, by default the capacity, would be used.
        """
        growth = partial + sum(block_hash not in self._active for block_hash in block_hashes)
        if self.used_blocks + growth > (self.capacity_blocks if most is None else most):
            return False
        # Blocks are revived before any is evicted, which protects the blocks of this call.
        for block_hash in block_hashes:
            self._inactive.pop(block_hash, None)
            self._active[block_hash] = self._active.get(block_hash, 0) + 1
        self.partial_blocks += partial
        for _ in range(self.used_blocks + len(self._inactive) - self.capacity_blocks):
            block_hash = next(iter(self._inactive))
            del self._inactive[block_hash]
            self._evicted.append(block_hash)
        return True

    def deref(self, block_hashes: Sequence[int]) -> None:
        """Drop a reference of every active hash, the tail first, so that it is evicted first."""
        for block_hash in reversed(block_hashes):
            refs = self._active[block_hash]
            if refs > 1:
                self._active[block_hash] = refs - 1
            else:
                del self._active[block_hash]
                self._inactive[block_hash] = None

    def promote(self, block_hash: int) -> bool:
        """Make a partial block full, or use the block with this hash; returns whether it is new."""
        self.release(1)
        is_new = not self.is_cached(block_hash)
        is_used = self.use([block_hash])
        assert is_used, "the partial block left room"
        return is_new

    def release(self, partial: int) -> None:
        """Free partial blocks."""
        assert 0 <= partial <= self.partial_blocks, "only reserved blocks are released"
        self.partial_blocks -= partial

    def drain_evicted(self) -> list[int]:
        """Return the hashes evicted since the last call, in order of eviction."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def clear(self) -> bool:
        """Forget every cached block; returns False, with nothing changed, while any is used."""
        if self.used_blocks:
            return False
        self._inactive.clear()
        return True
