"""FP8: weights in float8_e4m3fn with a scale per block, per row or for the whole tensor.

weight: [O, I]. weight_scale_inv: float32 [O / a, I / b] (DeepSeek, Qwen); despite its name it is
multiplied. weight_scale: one value, or one per row. Scales of activations (`input_scale`) are
not used: activations keep the dtype of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from dovetail.errors import WeightError
from dovetail.value_checks import shorten
from dovetail_quantized_checkpoints.formats.base import Format, ModuleTensors, Read, choice
from dovetail_quantized_checkpoints.stored_weight import ScaledWeight

_SCALES = ("weight_scale_inv", "weight_scale")


class FP8(Format):
    """Reads FP8 checkpoints."""

    marks: ClassVar[tuple[str, ...]] = (".weight_scale_inv", ".weight_scale")
    leaves: ClassVar[frozenset[str]] = frozenset({"weight", "input_scale", *_SCALES})

    def __init__(self, table: Mapping[str, Any]) -> None:
        """Check the fields of `quantization_config`."""
        choice(table, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
        block = table.get("weight_block_size")
        if block is not None and not (
            isinstance(block, (list, tuple))
            and len(block) == 2
            and all(type(size) is int and 0 < size < 1 << 20 for size in block)
        ):
            raise WeightError(
                f"quantization_config: weight_block_size is {shorten(block)}; it must be two "
                "positive integers"
            )
        self._block: tuple[int, int] | None = (block[0], block[1]) if block else None

    def shape(self, module: ModuleTensors, read: Read) -> tuple[int, int]:
        """Return (O, I)."""
        num_outputs, num_inputs = module.entry("weight", ("F8_E4M3",), num_dims=2).shape
        if not num_outputs * num_inputs:
            raise module.error("is empty", "weight")
        leaf = next((leaf for leaf in _SCALES if leaf in module.entries), _SCALES[0])
        scale = module.entry(leaf, ("F32", "BF16", "F16"))
        height, width = self._scale_block(leaf, scale.shape, num_outputs, num_inputs)
        if scale.shape not in ((), (1,), (num_outputs,)):
            rows, columns = -(-num_outputs // height), -(-num_inputs // width)
            module.expect_shape(leaf, (rows, columns))
        return num_outputs, num_inputs

    def _scale_block(
        self, leaf: str, shape: tuple[int, ...], num_outputs: int, num_inputs: int
    ) -> tuple[int, int]:
        is_plain = shape in ((), (1,), (num_outputs,))
        if leaf == "weight_scale_inv" and self._block and not is_plain:
            return self._block
        is_whole = shape in ((), (1,), (1, 1))
        return (num_outputs if is_whole else 1), num_inputs

    def open(self, module: ModuleTensors, read: Read) -> ScaledWeight:
        """Return the weight, whose values are computed in the dtype of the scales."""
        num_outputs, num_inputs = self.shape(module, read)
        leaf = next(leaf for leaf in _SCALES if leaf in module.entries)
        scale = read(f"{module.prefix}{leaf}")
        block = self._scale_block(leaf, tuple(scale.shape), num_outputs, num_inputs)
        weight = read(f"{module.prefix}weight")
        return ScaledWeight(
            shape=(num_outputs, num_inputs),
            numbers=lambda rows: weight[rows].to(scale.dtype),
            scales=scale if scale.ndim == 2 else scale.reshape(-1, 1),
            block=block,
        )
