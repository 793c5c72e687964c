"""A quantized weight as it is stored in a checkpoint.

Legend: O output features, I input features, G groups of input features, R rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

MAX_CHUNK_VALUES = 1 << 22
"""Maximum number of values that are dequantized at once."""
BLOCK_VALUES = 32
_BLOCK_TYPES = {"Q4_0": 8, "Q5_0": 16, "Q8_0": 128}
"""The block types with one scale and no zero point. They store integers from -n to n - 1."""


class StoredWeight(ABC):
    """A weight [O, I] that can be dequantized. shape: (O, I)."""

    shape: tuple[int, int]

    @abstractmethod
    def values(self, rows: slice) -> torch.Tensor:
        """Return the values of some rows, [R, I], in the dtype that the format prescribes."""

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """Return all values, [O, I], cast to `dtype`.

        Rows are processed in chunks, so that intermediate values need little memory.
        """
        result = torch.empty(self.shape, dtype=dtype)
        start = 0
        for values in self.pieces():
            result[start : start + len(values)] = values
            start += len(values)
        return result

    def pieces(self) -> Iterator[torch.Tensor]:
        """Yield all values in chunks of rows, in the dtype that the format prescribes."""
        num_rows, num_columns = self.shape
        step = max(1, MAX_CHUNK_VALUES // max(1, num_columns))
        for start in range(0, num_rows, step):
            yield self.values(slice(start, min(start + step, num_rows)))

    @property
    def block_type(self) -> str | None:
        """The block type that stores exactly the same values, or None."""
        return None

    def blocks(self) -> torch.Tensor:
        """Return the blocks of all rows, uint8 [O, bytes]. `block_type` must not be None."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class StoredExperts:
    """The weights of all experts of a layer, which are dequantized one expert at a time.

    shape: the shape of the dequantized weight, with E first. values_of: returns one expert's
    values.
    """

    shape: tuple[int, ...]
    values_of: Callable[[int], torch.Tensor]

    def pieces(self) -> Iterator[torch.Tensor]:
        """Yield the values of one expert at a time."""
        yield from map(self.values_of, range(self.shape[0]))


@dataclass(frozen=True, kw_only=True)
class IntegerWeight(StoredWeight):
    """W[o, i] = scale[o, g] · (code[o, i] − zero[o, g]), with g = group[i].

    bits: the bits of a code. codes: returns the unsigned codes of some rows, uint8 [R, I]. scales:
    [O, G].
    zeros: int16 [O, G], or one number for all groups. groups: int64 [I], or None if each group has
    the same number of consecutive features.
    """

    shape: tuple[int, int]
    bits: int
    codes: Callable[[slice], torch.Tensor]
    scales: torch.Tensor
    zeros: torch.Tensor | int
    groups: torch.Tensor | None = None

    def values(self, rows: slice) -> torch.Tensor:
        """Return the values of some rows in the dtype of the scales."""
        scales_RG = self.scales[rows]
        zeros = self.zeros if isinstance(self.zeros, int) else self.zeros[rows]
        codes_RI = self.codes(rows).to(torch.int16)
        if self.groups is not None:
            zeros_RI = zeros if isinstance(zeros, int) else zeros[:, self.groups]
            return (codes_RI - zeros_RI).to(scales_RG.dtype) * scales_RG[:, self.groups]
        codes_RGS = codes_RI.unflatten(1, (scales_RG.shape[1], -1))
        zeros_RG1 = zeros if isinstance(zeros, int) else zeros[..., None]
        differences = (codes_RGS - zeros_RG1).to(scales_RG.dtype)
        return (differences * scales_RG[..., None]).flatten(1)

    @property
    def block_type(self) -> str | None:
        """The smallest block type that represents all scales and (code - zero point) exactly.

        None if no block type does, or if groups do not consist of whole blocks.
        """
        group_size = self.shape[1] // self.scales.shape[1]
        is_regular = self.groups is None and group_size % BLOCK_VALUES == 0
        if not is_regular or not self._fits_half:
            return None
        zeros = torch.as_tensor(self.zeros)
        lowest, highest = -int(zeros.max()), (1 << self.bits) - 1 - int(zeros.min())
        fitting = (name for name, n in _BLOCK_TYPES.items() if -n <= lowest and highest < n)
        return next(fitting, None)

    @property
    def _fits_half(self) -> bool:
        if self.scales.dtype == torch.float16:
            return True
        return torch.equal(self.scales.half().to(self.scales.dtype), self.scales)

    def blocks(self) -> torch.Tensor:
        """Return the blocks: a float16 scale, then the integers. See `_block_bytes`."""
        block_type = self.block_type
        assert block_type is not None
        num_rows, num_columns = self.shape
        num_blocks = num_columns // BLOCK_VALUES
        repeats = num_blocks // self.scales.shape[1]
        scales_OB = self.scales.half().repeat_interleave(repeats, dim=1)
        pieces = []
        step = max(1, MAX_CHUNK_VALUES // num_columns)
        for start in range(0, num_rows, step):
            rows = slice(start, min(start + step, num_rows))
            codes = self.codes(rows).unflatten(1, (num_blocks, BLOCK_VALUES))
            codes = self._shifted(codes, rows, repeats, _BLOCK_TYPES[block_type])
            scales = scales_OB[rows, :, None].contiguous().view(torch.uint8)
            pieces.append(torch.cat((scales, _block_bytes(codes, block_type)), dim=2).flatten(1))
        return torch.cat(pieces)

    def _shifted(self, codes: torch.Tensor, rows: slice, repeats: int, middle: int) -> torch.Tensor:
        """Return codes whose zero point is `middle`, uint8 [R, blocks, 32]."""
        if isinstance(self.zeros, int):
            return codes if self.zeros == middle else codes + (middle - self.zeros)
        shift = ((middle - self.zeros[rows]) & 255).to(torch.uint8)  # sums are taken modulo 256
        return codes + shift.repeat_interleave(repeats, dim=1)[..., None]


def _block_bytes(codes: torch.Tensor, block_type: str) -> torch.Tensor:
    """Encode codes, uint8 [R, blocks, 32], as the bytes of a block type, without the scales.

    Q8_0 has a signed byte for each integer. Q4_0 and Q5_0 have four bits of the features j and
    j + 16 in byte j; before them, Q5_0 has the fifth bits of all features in a word of 32 bits.
    """
    if block_type == "Q8_0":
        return codes ^ 128
    low, high = codes.split(BLOCK_VALUES // 2, dim=2)
    halves = low & 15 | high << 4
    if block_type == "Q4_0":
        return halves
    bits = (codes >> 4).unflatten(2, (4, 8)) << torch.arange(8, dtype=torch.uint8)
    return torch.cat((bits.sum(-1, dtype=torch.uint8), halves), dim=2)


@dataclass(frozen=True, kw_only=True)
class ScaledWeight(StoredWeight):
    """W[o, i] = number[o, i] · scale[o // a, i // b], with float8 or int8 numbers, for example.

    numbers: returns the numbers of some rows, [R, I], in the dtype of the computation. scales: [P,
    Q] of that dtype. block: (a, b), how many rows and columns share a scale.
    """

    shape: tuple[int, int]
    numbers: Callable[[slice], torch.Tensor]
    scales: torch.Tensor
    block: tuple[int, int]

    def values(self, rows: slice) -> torch.Tensor:
        """Return the values of some rows in the dtype of the scales."""
        num_rows, num_columns = self.shape
        height, width = self.block
        row_numbers = torch.arange(num_rows)[rows] // height
        columns = torch.arange(num_columns) // width
        return self.numbers(rows) * self.scales[row_numbers][:, columns]
