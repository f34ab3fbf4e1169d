"""Names and numbers on which replicas agree without asking: hashes of what they have in common."""

import hashlib


def shared_id(text: str) -> int:
    """A worker's number between replicas, which may number workers in order of arrival."""
    # Below 2^63, so that every JSON parser can read it.
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def shared_name(text: str) -> str:
    """A name under which replicas find each other, 16 hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
