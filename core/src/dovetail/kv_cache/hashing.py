"""Names for cached blocks: chained, collision-safe hashes of what their tokens stand on.

A block's hash covers its own tokens, the multimodal content that stands in for some of them, and,
through its parent's, everything before it down to the root: block size, salt and adapter. SHA-256,
and every part of variable length goes in behind its length, so that nobody can make two prefixes
collide. Depends on no pool and no group.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from hashlib import sha256
from struct import pack

from dovetail.request import EncoderInput, Request

_VERSION = b"dovetail.kv.2"


def root_hash(block_size: int, salts: Iterable[str]) -> bytes:
    """Return the parent of a first block: requests of different salts never share a block."""
    parts = b"".join(pack("<I", len(raw)) + raw for raw in map(_encode, salts))
    return sha256(_VERSION + pack("<I", block_size) + parts).digest()


def block_hash(parent: bytes, token_ids: array[int], extra: bytes = b"") -> bytes:
    """Return the hash, 32 bytes, of a full block of int32 tokens that follows `parent`.

    extra: what else the block stands on, as `content_key` gives it.
    """
    return sha256(parent + token_ids.tobytes() + extra).digest()


def content_key(inputs: Sequence[EncoderInput], start: int, end: int) -> bytes:
    """Return what the tokens [start, end) take from multimodal content; b"" for nothing.

    The place of the content counts, seen from the block: equal content one token later is another.
    """
    return b"".join(
        pack("<qII", item.position - start, item.num_tokens, len(item.content_hash))
        + item.content_hash
        for item in inputs
        if item.position < end and start < item.position + item.num_tokens
    )


def extend_hashes(request: Request, num_blocks: int, block_size: int) -> None:
    """Append to `request.block_hashes`, so that it has `num_blocks` or more; tokens are known."""
    hashes, inputs = request.block_hashes, request.encoder_inputs
    if len(hashes) >= num_blocks:
        return
    parent = hashes[-1] if hashes else _root(request, block_size)
    for start in range(len(hashes) * block_size, num_blocks * block_size, block_size):
        end = start + block_size
        extra = content_key(inputs, start, end) if inputs else b""
        parent = block_hash(parent, request.token_ids[start:end], extra)
        hashes.append(parent)


class PrefixHasher:
    """Names the blocks of requests; what a prompt has in common with the one before costs no hash.

    Copies of a prompt, and prompts behind the same preamble, come one after the other.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._last: Request | None = None

    def extend(self, request: Request, num_blocks: int, most: int = 0) -> int:
        """Let `request.block_hashes` have `num_blocks` or more; return how many were computed.

        most: compute so many at most, even if some are missing then; 0 for no limit. Hashes that
        are taken over from the prompt before count a little, too: as many take as long as one.
        """
        hashes, last, num_common = request.block_hashes, self._last, 0
        if len(hashes) >= num_blocks:
            return 0
        if not hashes and last is not None and last is not request:
            num_common = self._num_common(request, last, num_blocks)
            hashes += last.block_hashes[:num_common]
        start = len(hashes)
        end = min(num_blocks, start + most) if most else num_blocks
        extend_hashes(request, end, self._block_size)
        if end > _MIN_COMMON:
            self._last = request
        return end - start + num_common // _COPIES_A_HASH

    def _num_common(self, request: Request, last: Request, num_blocks: int) -> int:
        """Return how many leading blocks of both have the same name, as far as `last` knows it."""
        size = self._block_size
        most = min(num_blocks, len(last.block_hashes))
        ours, theirs = request.token_ids, last.token_ids
        if most < _MIN_COMMON or ours[:size] != theirs[:size] or _differ(request, last):
            return 0
        if ours[: most * size] == theirs[: most * size]:
            return most
        low, high = 1, most  # the first `low` are equal, the first `high` are not
        while high - low > 1:
            middle = (low + high) // 2
            part = slice(low * size, middle * size)
            low, high = (middle, high) if ours[part] == theirs[part] else (low, middle)
        return low


_COPIES_A_HASH = 64
_MIN_COMMON = 4
"""Blocks below which a comparison is not worth it."""


def _differ(one: Request, other: Request) -> bool:
    """Return whether equal tokens of both may have different names."""
    if one.encoder_inputs or other.encoder_inputs:
        return True
    return (one.cache_salt, one.lora_id) != (other.cache_salt, other.lora_id)


def _root(request: Request, block_size: int) -> bytes:
    return root_hash(block_size, (request.cache_salt, request.lora_id))


def _encode(salt: str) -> bytes:
    # A user's string may hold lone surrogates; they must neither fail nor become equal.
    return salt.encode("utf-8", "surrogatepass")
