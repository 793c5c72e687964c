"""Chained hashes of blocks, the keys of the prefix cache.

The hash of a block covers its tokens, the multimodal content of its placeholder tokens, and the
hash of the previous block. The first block uses a root hash of block size, salt and adapter. The
hash is SHA-256, and every part of variable length is preceded by its length, so that no client can
construct a collision.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from hashlib import sha256
from struct import pack

from dovetail.request import EncoderInput, Request

_VERSION = b"dovetail.kv.2"


def root_hash(block_size: int, salts: Iterable[str]) -> bytes:
    """Return the parent hash of a first block. Requests with different salts never share blocks."""
    parts = b"".join(pack("<I", len(raw)) + raw for raw in map(_encode, salts))
    return sha256(_VERSION + pack("<I", block_size) + parts).digest()


def block_hash(parent: bytes, token_ids: array[int], extra: bytes = b"") -> bytes:
    """Return the hash, 32 bytes, of a full block of int32 tokens that follows `parent`.

    extra: the key of multimodal content in the block (`content_key`).
    """
    return sha256(parent + token_ids.tobytes() + extra).digest()


def content_key(inputs: Sequence[EncoderInput], start: int, end: int) -> bytes:
    """Return a key of the multimodal content in the tokens [start, end), or b"" for none.

    The key depends on the position of the content relative to the block.
    """
    return b"".join(
        pack("<qII", item.position - start, item.num_tokens, len(item.content_hash))
        + item.content_hash
        for item in inputs
        if item.position < end and start < item.position + item.num_tokens
    )


def extend_hashes(request: Request, num_blocks: int, block_size: int) -> None:
    """Extend `request.block_hashes` to at least `num_blocks`. Their tokens must be known."""
    hashes, inputs = request.block_hashes, request.encoder_inputs
    if len(hashes) >= num_blocks:
        return
    parent = hashes[-1] if hashes else _root(request, block_size)
    first, last = len(hashes) * block_size, num_blocks * block_size
    if not inputs:  # hashes the same bytes as `block_hash`, in less time
        tokens = request.token_ids[first:last].tobytes()
        size = request.token_ids.itemsize * block_size
        for begin in range(0, len(tokens), size):
            parent = sha256(parent + tokens[begin : begin + size]).digest()
            hashes.append(parent)
        return
    for start in range(first, last, block_size):
        end = start + block_size
        extra = content_key(inputs, start, end)
        parent = block_hash(parent, request.token_ids[start:end], extra)
        hashes.append(parent)


class PrefixHasher:
    """Computes block hashes of requests and reuses hashes shared with the previous prompt.

    Copies of a prompt, and prompts with the same prefix, often arrive one after another.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._last: Request | None = None

    def extend(self, request: Request, num_blocks: int, limit: int = 0) -> int:
        """Extend `request.block_hashes` to at least `num_blocks`. Return the number computed.

        limit: maximum number to compute, even if fewer than `num_blocks` exist afterwards; 0 for no
        limit. A copied hash counts as a fraction of a computed one, because it takes less time.
        """
        hashes, last, num_common = request.block_hashes, self._last, 0
        if len(hashes) >= num_blocks:
            return 0
        if not hashes and last is not None and last is not request:
            num_common = self._num_common(request, last, num_blocks)
            hashes += last.block_hashes[:num_common]
        start = len(hashes)
        end = min(num_blocks, start + limit) if limit else num_blocks
        extend_hashes(request, end, self._block_size)
        if end > _MIN_COMMON:
            self._last = request
        return end - start + num_common // _COPIES_A_HASH

    def _num_common(self, request: Request, last: Request, num_blocks: int) -> int:
        """Return how many leading blocks of both requests have the same known hash."""
        size = self._block_size
        maximum = min(num_blocks, len(last.block_hashes))
        token_ids, last_token_ids = request.token_ids, last.token_ids
        if (
            maximum < _MIN_COMMON
            or token_ids[:size] != last_token_ids[:size]
            or _differ(request, last)
        ):
            return 0
        if token_ids[: maximum * size] == last_token_ids[: maximum * size]:
            return maximum
        low, high = 1, maximum  # the first `low` blocks are equal, the first `high` are not
        while high - low > 1:
            middle = (low + high) // 2
            part = slice(low * size, middle * size)
            low, high = (middle, high) if token_ids[part] == last_token_ids[part] else (low, middle)
        return low


_COPIES_A_HASH = 64
_MIN_COMMON = 4
"""Minimum number of blocks for which comparing prompts is faster than hashing."""


def _differ(request: Request, other: Request) -> bool:
    """Return whether the two requests may have different hashes for equal tokens."""
    if request.encoder_inputs or other.encoder_inputs:
        return True
    return (request.cache_salt, request.lora_id) != (other.cache_salt, other.lora_id)


def _root(request: Request, block_size: int) -> bytes:
    return root_hash(block_size, (request.cache_salt, request.lora_id))


def _encode(salt: str) -> bytes:
    # Lone surrogates in a user's string must not raise errors or cause equal hashes.
    return salt.encode("utf-8", "surrogatepass")
