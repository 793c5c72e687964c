"""AWQ, version "gemm": 4-bit codes; a scale and a zero point per group.

qweight: int32 [I, O / 8], qzeros: int32 [G, O / 8], scales: [G, O]. A word contains the codes of
eight output features in the order of `ORDER`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from dovetail_quantized_checkpoints.formats.base import (
    Format,
    ModuleTensors,
    Read,
    choice,
    group_count,
    read_group_size,
)
from dovetail_quantized_checkpoints.packing import unpack
from dovetail_quantized_checkpoints.stored_weight import IntegerWeight

BITS = 4
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output feature, within its group of eight, of each code of a word."""
_PLACES = torch.tensor(ORDER).argsort()


class AWQ(Format):
    """Reads AWQ checkpoints of AutoAWQ."""

    marks: ClassVar[tuple[str, ...]] = (".qweight",)
    leaves: ClassVar[frozenset[str]] = frozenset({"qweight", "qzeros", "scales"})

    def __init__(self, table: Mapping[str, Any]) -> None:
        """Check the fields of `quantization_config`."""
        choice({"bits": table.get("bits", table.get("w_bit"))}, "bits", (BITS,), BITS)
        choice(table, "version", ("gemm",), "gemm")
        choice(table, "backend", ("autoawq",), "autoawq")
        choice(table, "zero_point", (True,), True)
        size = read_group_size(table, "group_size" if "group_size" in table else "q_group_size")
        self._group_sizes = () if size is None else (size,)

    def shape(self, module: ModuleTensors, read: Read) -> tuple[int, int]:
        """Return (O, I)."""
        num_inputs, num_words = module.entry("qweight", ("I32",), num_dims=2).shape
        scales = module.entry("scales", ("F16", "BF16", "F32"), num_dims=2)
        num_groups = group_count(module, "scales", scales.shape[0], num_inputs, self._group_sizes)
        module.expect_shape("scales", (num_groups, num_words * len(ORDER)))
        module.entry("qzeros", ("I32",), num_dims=2)
        module.expect_shape("qzeros", (num_groups, num_words))
        return num_words * len(ORDER), num_inputs

    def open(self, module: ModuleTensors, read: Read) -> IntegerWeight:
        """Return the weight."""
        words = read(f"{module.prefix}qweight")

        def codes(rows: slice) -> torch.Tensor:
            first, end = rows.start // len(ORDER), -(-rows.stop // len(ORDER))
            start = rows.start - first * len(ORDER)
            codes_OI = _in_order(unpack(words[:, first:end], BITS)).T
            return codes_OI[start : start + rows.stop - rows.start].contiguous()

        return IntegerWeight(
            shape=self.shape(module, read),
            bits=BITS,
            codes=codes,
            scales=read(f"{module.prefix}scales").T.contiguous(),
            zeros=_in_order(unpack(read(f"{module.prefix}qzeros"), BITS)).T.to(torch.int16),
        )


def _in_order(codes: torch.Tensor) -> torch.Tensor:
    """Return codes [..., O] in the order of the output features."""
    return codes.unflatten(-1, (-1, len(ORDER)))[..., _PLACES].flatten(-2)
