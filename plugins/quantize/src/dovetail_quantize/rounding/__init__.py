"""Rounding of weights to the block types of GGUF files, in torch.

block_types     fits scales to weights, rounds, and encodes blocks
scale_search    scales and minima of groups with the least weighted squared error
"""

from dovetail_quantize.rounding.block_types import (
    BLOCK_TYPES,
    BlockType,
    Grid,
    decode_rows,
    quantize_rows,
    round_to_values,
    type_that_fits,
)

__all__ = [
    "BLOCK_TYPES",
    "BlockType",
    "Grid",
    "decode_rows",
    "quantize_rows",
    "round_to_values",
    "type_that_fits",
]
