"""The tensor types of GGUF files, with names and block sizes.

A row of a tensor is a sequence of blocks; a block contains `num_values` values in `num_bytes`
bytes. Source: https://github.com/ggml-org/ggml/blob/master/include/ggml.h
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TensorType:
    """One type. number: the number of the type in files."""

    number: int
    name: str
    num_values: int
    num_bytes: int

    @property
    def is_plain(self) -> bool:
        """Whether values are stored unquantized, without scales."""
        return self.num_values == 1


_ROWS = (
    (0, "F32", 1, 4),
    (1, "F16", 1, 2),
    (2, "Q4_0", 32, 18),
    (3, "Q4_1", 32, 20),
    (6, "Q5_0", 32, 22),
    (7, "Q5_1", 32, 24),
    (8, "Q8_0", 32, 34),
    (10, "Q2_K", 256, 84),
    (11, "Q3_K", 256, 110),
    (12, "Q4_K", 256, 144),
    (13, "Q5_K", 256, 176),
    (14, "Q6_K", 256, 210),
    (16, "IQ2_XXS", 256, 66),
    (17, "IQ2_XS", 256, 74),
    (18, "IQ3_XXS", 256, 98),
    (19, "IQ1_S", 256, 50),
    (20, "IQ4_NL", 32, 18),
    (21, "IQ3_S", 256, 110),
    (22, "IQ2_S", 256, 82),
    (23, "IQ4_XS", 256, 136),
    (24, "I8", 1, 1),
    (25, "I16", 1, 2),
    (26, "I32", 1, 4),
    (27, "I64", 1, 8),
    (28, "F64", 1, 8),
    (29, "IQ1_M", 256, 56),
    (30, "BF16", 1, 2),
    (34, "TQ1_0", 256, 54),
    (35, "TQ2_0", 256, 66),
    (39, "MXFP4", 32, 17),
    (40, "NVFP4", 64, 36),
)

TENSOR_TYPES = {
    number: TensorType(number=number, name=name, num_values=num_values, num_bytes=num_bytes)
    for number, name, num_values, num_bytes in _ROWS
}
"""Every supported type by its number. Types without a dequantizer (Q8_1, Q8_K) are not used for
weights."""
