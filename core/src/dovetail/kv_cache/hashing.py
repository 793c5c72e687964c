"""Names for cached blocks: chained, collision-safe hashes of what their tokens stand on.

A block's hash covers its own tokens and, through its parent's, every token before it and the salt
that the chain begins with. SHA-256, so that nobody can make two prefixes collide.
"""

from __future__ import annotations

from array import array
from hashlib import sha256

_ROOT = b"dovetail.kv.1"


def root_hash(salt: str) -> bytes:
    """Return the parent of a first block: requests of different salts never share a block."""
    return sha256(_ROOT + salt.encode()).digest()


def block_hash(parent: bytes, token_ids: array[int]) -> bytes:
    """Return the hash, 32 bytes, of a full block of int32 tokens that follows `parent`."""
    return sha256(parent + token_ids.tobytes()).digest()
