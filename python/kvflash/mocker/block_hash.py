"""Token ids to chained block hashes: each covers its tokens and, through its parent, all before.

Adapter and cache salt are in the root of the chain, so that equal tokens of others never match.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

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
