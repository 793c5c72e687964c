"""MXFP4: the experts of gpt-oss. float4_e2m1 codes; 32 features share an exponent.

X_blocks: uint8 [E, O, I / 32, 16], two codes in a byte, the low four bits first. X_scales: uint8
[E, O, I / 32], exponents. X is gate_up_proj or down_proj; unquantized it is [E, I, O].
Source: Open Compute Project 2023, OCP Microscaling Formats (MX) Specification v1.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from dovetail_quantized_checkpoints.formats.base import Format, ModuleTensors, Read
from dovetail_quantized_checkpoints.formats.compressed_tensors import EXPONENT_BIAS, FP4_VALUES
from dovetail_quantized_checkpoints.stored_weight import StoredExperts

BLOCK_BYTES = 16
_ENDINGS = ("_blocks", "_scales")


class MXFP4(Format):
    """Reads the experts of gpt-oss. All other weights are not quantized."""

    marks: ClassVar[tuple[str, ...]] = _ENDINGS
    leaves: ClassVar[frozenset[str]] = frozenset(_ENDINGS)
    quantizes_all = False

    def __init__(self, table: Mapping[str, Any]) -> None:
        """Create the format. No field of `quantization_config` changes it."""

    def split(self, name: str) -> tuple[str, str] | None:
        """Return the name of the experts' weight, and `_blocks` or `_scales`."""
        ending = next((ending for ending in _ENDINGS if name.endswith(ending)), None)
        return None if ending is None else (name.removesuffix(ending), ending)

    def weight_name(self, prefix: str) -> str:
        """Return the prefix, which is the name of the experts' weight."""
        return prefix

    def shape(self, module: ModuleTensors, read: Read) -> tuple[int, ...]:
        """Return (E, I, O), the shape of the unquantized weight."""
        blocks = module.entry("_blocks", ("U8",), num_dims=4)
        module.entry("_scales", ("U8",), num_dims=3)
        num_experts, num_outputs, num_groups, num_bytes = blocks.shape
        if num_bytes != BLOCK_BYTES or not num_experts * num_outputs * num_groups:
            raise module.error(
                f"has the shape {list(blocks.shape)}; blocks have {BLOCK_BYTES} bytes", "_blocks"
            )
        module.expect_shape("_scales", (num_experts, num_outputs, num_groups))
        return num_experts, num_groups * BLOCK_BYTES * 2, num_outputs

    def open(self, module: ModuleTensors, read: Read) -> StoredExperts:
        """Return the weights of all experts, in float32."""
        shape = self.shape(module, read)
        blocks, exponents = read(f"{module.prefix}_blocks"), read(f"{module.prefix}_scales")

        def values(expert: int) -> torch.Tensor:
            packed = blocks[expert]
            codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(2)
            scales = torch.exp2(exponents[expert].float() - EXPONENT_BIAS)
            return (FP4_VALUES[codes.long()] * scales[..., None]).flatten(1).T

        return StoredExperts(shape=shape, values_of=values)
