"""Unpacks codes of a few bits from 32-bit words.

Code k of a row begins at bit k * bits of the row; the lowest bits of a word are first.
"""

from __future__ import annotations

import torch

WORD_BITS = 32


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the unsigned codes of the last dimension of `words`.

    words: int32 [..., W]; missing words of the last 32 codes are zeros. Returns int16
    [..., W * 32 / bits].
    """
    unsigned = words.to(torch.int64) & 0xFFFFFFFF
    if WORD_BITS % bits:
        unsigned = torch.nn.functional.pad(unsigned, (0, -unsigned.shape[-1] % bits))
    mask = (1 << bits) - 1
    if WORD_BITS % bits == 0:
        shifts = torch.arange(0, WORD_BITS, bits)
        return ((unsigned[..., None] >> shifts) & mask).flatten(-2).to(torch.int16)
    runs = unsigned.unflatten(-1, (-1, bits))  # `bits` words contain 32 codes
    first = torch.arange(WORD_BITS) * bits
    word, shift = first // WORD_BITS, first % WORD_BITS
    following = torch.clamp(word + 1, max=bits - 1)
    codes = runs[..., word] >> shift | runs[..., following] << (WORD_BITS - shift)
    return (codes & mask).flatten(-2).to(torch.int16)
