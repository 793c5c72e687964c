"""Unpacks codes of a few bits from 32-bit words.

Code k of a row begins at bit k * bits of the row; the lowest bits of a word are first.
"""

from __future__ import annotations

import torch

WORD_BITS = 32
CODE_BITS = 8
"""Bits of the type in which codes are returned."""


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the unsigned codes of the last dimension of `words`.

    words: int32 [..., W]; missing words of the last 32 codes are zeros. Returns uint8
    [..., W * 32 / bits].
    """
    if WORD_BITS % bits == 0:
        return _split_bytes(words, bits)
    unsigned = words.to(torch.int64) & 0xFFFFFFFF
    unsigned = torch.nn.functional.pad(unsigned, (0, -unsigned.shape[-1] % bits))
    runs = unsigned.unflatten(-1, (-1, bits))  # `bits` words contain 32 codes
    first = torch.arange(WORD_BITS) * bits
    word, shift = first // WORD_BITS, first % WORD_BITS
    following = torch.clamp(word + 1, max=bits - 1)
    codes = runs[..., word] >> shift | runs[..., following] << (WORD_BITS - shift)
    return (codes & (1 << bits) - 1).flatten(-2).to(torch.uint8)


def interleave(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Return the elements of two uint8 tensors alternately in the last dimension, `low` first."""
    # Pairs are written as words of 16 bits, which is faster than every second byte.
    pairs = high.to(torch.int16).bitwise_left_shift_(8).bitwise_or_(low)
    return pairs.view(torch.uint8)


def _split_bytes(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the codes of each byte, which contains complete codes. The first byte is lowest."""
    codes = words.contiguous().view(torch.uint8)
    width = CODE_BITS
    while width > bits:
        width //= 2
        codes = interleave(codes & (1 << width) - 1, codes >> width)
    return codes
