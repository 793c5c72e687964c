"""The GGUF block types to which weights are rounded: fit, round, encode.

A type fits a grid to the weights of whole blocks: the scale and the minimum of each group, with the
precision in which they are stored. Weights are then rounded to the grid, all at once
(`quantize_rows`) or column by column (by a method that corrects the error of earlier columns), and
encoded as blocks.
Source: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h (layouts)
Dimensions: O output features, I input features, N blocks, G groups of a block, K values of a group,
B bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from dovetail_quantize.rounding.scale_search import search_range, search_scale

_CHUNK_VALUES = 1 << 18
"""Number of weights that are rounded at once, so that intermediate results stay in the processor's
cache."""
# Candidates do not clip the greatest weight: that lowers the squared error of weights, but raises
# the divergence of a model's outputs.
_TARGETS = {
    -8: (-7.5, -7.75, -8.0),
    -16: (-15.5, -16.0),
    -32: (-31.0, -31.5, -32.0),
}
_NEIGHBORS = tuple((up, down) for up in (0, -1, 1) for down in (0, -1, 1))
"""Offsets added to the rounded (scale, minimum) to get the candidates of Q4_K; (0, 0) is first."""
_SPANS_4 = (13.5, 14.0, 14.4, 14.8, 15.2, 15.6, 16.0, 16.5)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The values that the weights of blocks can have: scale · code + minimum.

    scale, minimum: float32 [N, G, 1], by group. stored: the numbers of the encoded blocks.
    """

    scale: torch.Tensor
    minimum: torch.Tensor
    stored: Mapping[str, torch.Tensor]


class BlockType(ABC):
    """One type. size: values in a block. group: values with one scale. num_bytes: bytes of a block.

    low, high: the lowest and the highest code.
    """

    def __init__(self, name: str, size: int, group: int, num_bytes: int, low: int) -> None:
        self.name, self.size, self.group, self.num_bytes = name, size, group, num_bytes
        self.low = low

    @property
    def high(self) -> int:
        """The highest code."""
        return -self.low - 1 if self.low else 15

    @property
    def bits_per_weight(self) -> float:
        """Bits per stored weight, including its share of the scales."""
        return self.num_bytes * 8 / self.size

    @abstractmethod
    def fit(self, x_NGK: torch.Tensor, importance_NGK: torch.Tensor) -> Grid:
        """Return the grid for float32 blocks. Importances broadcast to them."""

    @abstractmethod
    def encode(self, codes_NS: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Return blocks, uint8 [N, B]. codes: int32 [N, values of a block]."""

    def round(self, x_NGK: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Return the codes of the nearest values, float32 like `x`."""
        codes_NGK = ((x_NGK - grid.minimum) / grid.scale).round_()
        return codes_NGK.nan_to_num_(0.0).clamp_(self.low, self.high)


class _OneLevel(BlockType):
    """Types with a float16 scale for each block and signed codes: Q4_0, Q5_0 and Q8_0."""

    def fit(self, x_NGK: torch.Tensor, importance_NGK: torch.Tensor) -> Grid:
        if self.name == "Q8_0":
            scale_NG1 = x_NGK.abs().amax(-1, keepdim=True) / 127
        else:
            scale_NG1 = search_scale(x_NGK, importance_NGK, self.low, _TARGETS[self.low])
        half_NG1 = scale_NG1.half()
        stored = half_NG1.float()
        return Grid(scale=stored, minimum=torch.zeros_like(stored), stored={"scale": half_NG1})

    def encode(self, codes_NS: torch.Tensor, grid: Grid) -> torch.Tensor:
        scale_N2 = _bytes_of(grid.stored["scale"].flatten(1))
        if self.name == "Q8_0":
            return torch.cat([scale_N2, codes_NS.to(torch.int8).view(torch.uint8)], 1)
        unsigned_NS = codes_NS - self.low
        parts = [scale_N2, _nibbles((unsigned_NS & 15).to(torch.uint8))]
        if self.name == "Q5_0":  # the fifth bits of all codes, in 4 bytes
            bits_N48 = (unsigned_NS >> 4).view(-1, 4, 8) << torch.arange(8)
            parts.insert(1, bits_N48.sum(-1).to(torch.uint8))
        return torch.cat(parts, 1)


class _Q41(BlockType):
    """The type Q4_1: a float16 scale and minimum for each block, and unsigned codes."""

    def fit(self, x_NGK: torch.Tensor, importance_NGK: torch.Tensor) -> Grid:
        scale_NG1, minimum_NG1 = search_range(x_NGK, importance_NGK, self.high, _SPANS_4)
        stored = {"scale": scale_NG1.half(), "minimum": minimum_NG1.half()}
        return Grid(scale=stored["scale"].float(), minimum=stored["minimum"].float(), stored=stored)

    def encode(self, codes_NS: torch.Tensor, grid: Grid) -> torch.Tensor:
        stored = torch.cat([grid.stored["scale"], grid.stored["minimum"]], -1)
        return torch.cat([_bytes_of(stored.flatten(1)), _nibbles(codes_NS.to(torch.uint8))], 1)


class _Q4K(BlockType):
    """The type Q4_K: eight groups of 32. Scales and minima have 6 bits and a factor in float16.

    Rounding scale and minimum separately does not always give the best pair, so the neighboring
    values of both are also tried.
    """

    def fit(self, x_NGK: torch.Tensor, importance_NGK: torch.Tensor) -> Grid:
        scale_NG1, minimum_NG1 = search_range(x_NGK, importance_NGK, self.high, _SPANS_4)
        factor_N11, scales_NG1 = _second_level(scale_NG1, 63)
        offset_N11, offsets_NG1 = _second_level(-minimum_NG1, 63)
        pairs = [
            self._grid(factor_N11, offset_N11, scales_NG1 + up, offsets_NG1 + down)
            for up, down in _NEIGHBORS
        ]
        errors = [self._errors(x_NGK, importance_NGK, pair) for pair in pairs]
        choice_NG1 = torch.stack(errors).nan_to_num_(torch.inf).argmin(0)
        steps_P2 = torch.tensor(_NEIGHBORS, dtype=x_NGK.dtype)
        up_NG1, down_NG1 = steps_P2[choice_NG1].unbind(-1)
        return self._grid(factor_N11, offset_N11, scales_NG1 + up_NG1, offsets_NG1 + down_NG1)

    def _grid(
        self,
        factor_N11: torch.Tensor,
        offset_N11: torch.Tensor,
        scales_NG1: torch.Tensor,
        offsets_NG1: torch.Tensor,
    ) -> Grid:
        scales_NG1, offsets_NG1 = scales_NG1.clamp(0, 63), offsets_NG1.clamp(0, 63)
        return Grid(
            scale=factor_N11.float() * scales_NG1,
            minimum=-(offset_N11.float() * offsets_NG1),
            stored={
                "factors": torch.cat([factor_N11, offset_N11], 1).squeeze(-1),
                "scales": scales_NG1.squeeze(-1),
                "minima": offsets_NG1.squeeze(-1),
            },
        )

    def _errors(
        self, x_NGK: torch.Tensor, importance_NGK: torch.Tensor, grid: Grid
    ) -> torch.Tensor:
        """Return the squared error of each group [N, G, 1]."""
        values_NGK = self.round(x_NGK, grid) * grid.scale + grid.minimum
        return (importance_NGK * (values_NGK - x_NGK).square_()).sum(-1, keepdim=True)

    def encode(self, codes_NS: torch.Tensor, grid: Grid) -> torch.Tensor:
        s = grid.stored["scales"].to(torch.uint8)
        m = grid.stored["minima"].to(torch.uint8)
        first = s[:, :4] | (s[:, 4:] >> 4 << 6)
        second = m[:, :4] | (m[:, 4:] >> 4 << 6)
        third = (s[:, 4:] & 15) | (m[:, 4:] & 15) << 4
        pairs = codes_NS.to(torch.uint8).view(-1, 4, 2, 32)
        codes = (pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1)
        return torch.cat([_bytes_of(grid.stored["factors"]), first, second, third, codes], 1)


class _Q6K(BlockType):
    """The type Q6_K: sixteen groups of 16. Scales have 8 bits and a factor in float16."""

    def fit(self, x_NGK: torch.Tensor, importance_NGK: torch.Tensor) -> Grid:
        scale_NG1 = search_scale(x_NGK, importance_NGK, self.low, _TARGETS[self.low])
        factor_N11, scales_NG1 = _second_level(scale_NG1, 127)
        scale = factor_N11.float() * scales_NG1
        return Grid(
            scale=scale,
            minimum=torch.zeros_like(scale),
            stored={"factor": factor_N11.squeeze(-1), "scales": scales_NG1.squeeze(-1)},
        )

    def encode(self, codes_NS: torch.Tensor, grid: Grid) -> torch.Tensor:
        q = (codes_NS + 32).to(torch.uint8).view(-1, 2, 4, 32)  # half, quarter, place
        low = torch.cat(
            [q[:, :, 0] & 15 | (q[:, :, 2] & 15) << 4, q[:, :, 1] & 15 | (q[:, :, 3] & 15) << 4], -1
        )
        high = q[:, :, 0] >> 4 | q[:, :, 1] >> 4 << 2 | q[:, :, 2] >> 4 << 4 | q[:, :, 3] >> 4 << 6
        scales = grid.stored["scales"].to(torch.int8).view(torch.uint8)
        factor = _bytes_of(grid.stored["factor"])
        return torch.cat([low.flatten(1), high.flatten(1), scales, factor], 1)


BLOCK_TYPES: Mapping[str, BlockType] = {
    item.name: item
    for item in (
        _OneLevel("Q4_0", 32, 32, 18, -8),
        _Q41("Q4_1", 32, 32, 20, 0),
        _OneLevel("Q5_0", 32, 32, 22, -16),
        _OneLevel("Q8_0", 32, 32, 34, -128),
        _Q4K("Q4_K", 256, 32, 144, 0),
        _Q6K("Q6_K", 256, 16, 210, -32),
    )
}
"""The block types to which weights can be rounded, by name."""


def type_that_fits(names: Sequence[str], in_features: int) -> str | None:
    """Return the first of `names` whose blocks divide rows of `in_features`, or None."""
    return next((name for name in names if not in_features % BLOCK_TYPES[name].size), None)


@torch.no_grad()
def quantize_rows(
    weight_OI: torch.Tensor, type_name: str, importance_I: torch.Tensor | None = None
) -> torch.Tensor:
    """Round the rows of a weight to blocks, uint8 [O, bytes of a row].

    importance_I: float32, the weight of the squared error of each input feature, such as the mean
    square of its activations; None if it is not known. Weights that are NaN or infinite, or too
    large for the type's scales, give scales that are not finite.
    """
    kind = BLOCK_TYPES[type_name]
    num_rows, size = weight_OI.shape
    rows = max(1, _CHUNK_VALUES // size)
    parts = [_round_rows(chunk, kind, importance_I) for chunk in weight_OI.split(rows)]
    return torch.cat(parts).view(num_rows, size // kind.size * kind.num_bytes)


def decode_rows(blocks_OB: torch.Tensor, type_name: str) -> torch.Tensor:
    """Return the values of rows of blocks, float32 [O, I]."""
    kind = GGMLQuantizationType[type_name]
    return torch.from_numpy(dequantize(blocks_OB.numpy(), kind))


def round_to_values(
    weight_OI: torch.Tensor, type_name: str, importance_I: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the values, float32 [O, I], of the blocks that `quantize_rows` creates."""
    return decode_rows(quantize_rows(weight_OI, type_name, importance_I), type_name)


def _round_rows(
    weight_OI: torch.Tensor, kind: BlockType, importance_I: torch.Tensor | None
) -> torch.Tensor:
    x_NGK = weight_OI.float().reshape(-1, kind.size // kind.group, kind.group)
    grid = kind.fit(x_NGK, _importances(x_NGK, importance_I))
    codes_NGK = kind.round(x_NGK, grid)
    return kind.encode(codes_NGK.flatten(1).to(torch.int32), grid)


def _importances(x_NGK: torch.Tensor, importance_I: torch.Tensor | None) -> torch.Tensor:
    """Return the importance of each weight's error, arranged in blocks. See `quantize_rows`."""
    if importance_I is None:
        return torch.ones((), dtype=x_NGK.dtype)
    blocks = importance_I.view(-1, *x_NGK.shape[1:])
    return blocks.repeat(len(x_NGK) // len(blocks), 1, 1)


def _second_level(scale_NG1: torch.Tensor, maximum: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales as a float16 factor [N, 1, 1] times integers from -maximum to maximum."""
    greatest_N11 = scale_NG1.abs().amax(1, keepdim=True)
    factor_N11 = (greatest_N11 / maximum).half()
    numbers_NG1 = (scale_NG1 / factor_N11.float()).round_().nan_to_num_(0.0, 0.0, 0.0)
    return factor_N11, numbers_NG1.clamp_(-maximum, maximum)


def _bytes_of(halves: torch.Tensor) -> torch.Tensor:
    return halves.contiguous().view(torch.uint8)


def _nibbles(codes_NK: torch.Tensor) -> torch.Tensor:
    """Return codes of a block of 32 as bytes: the first half in the low nibbles."""
    return codes_NK[:, :16] | codes_NK[:, 16:] << 4
