"""GPTQ (AutoGPTQ, GPTQModel): codes of 2, 3, 4 or 8 bits; a scale and zero point per group.

qweight: int32 [I * bits / 32, O], packed along I. qzeros: int32 [G, O * bits / 32], packed along O.
scales: [G, O]. g_idx: int32 [I], the group of each feature; not in order with `desc_act`. With
g_idx, the last group may have fewer features than the others. Version 1 stores each zero point
minus 1, subtracted from whole words; AutoGPTQ subtracts it from each code of 3 bits.
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
from dovetail_quantized_checkpoints.packing import WORD_BITS, unpack
from dovetail_quantized_checkpoints.stored_weight import IntegerWeight

BITS = (2, 3, 4, 8)
SCALE_DTYPES = ("F16", "BF16", "F32")
_ONES = {
    2: (0x55555555,),
    3: (0x24924924, 0x92492492, 0x49249249),
    4: (0x11111111,),
    8: (0x01010101,),
}
"""What version 1 subtracts from consecutive words, by bits. For 3 bits, only GPTQModel does."""


class GPTQ(Format):
    """Reads GPTQ checkpoints of version 1 ("gptq") and 2 ("gptq_v2")."""

    marks: ClassVar[tuple[str, ...]] = (".qweight",)
    leaves: ClassVar[frozenset[str]] = frozenset({"qweight", "qzeros", "scales", "g_idx"})

    def __init__(self, table: Mapping[str, Any]) -> None:
        """Check the fields of `quantization_config`."""
        self._bits: int = choice(table, "bits", BITS, 4)
        version = choice(table, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
        choice(table, "pack_dtype", ("int32",), "int32")
        self._stores_less = version == "gptq"
        self._differs = bool(table.get("dynamic"))
        self._group_sizes = _read_group_sizes(table)
        meta = table.get("meta")
        tools = str(meta.get("quantizer")) if isinstance(meta, Mapping) else ""
        self._subtracts_words = "gptqmodel" in tools.lower()

    def shape(self, module: ModuleTensors, read: Read) -> tuple[int, int]:
        """Return (O, I)."""
        num_words, num_outputs = module.entry("qweight", ("I32",), num_dims=2).shape
        scales = module.entry("scales", SCALE_DTYPES, num_dims=2)
        bits = self._bits
        if "g_idx" in module.entries:
            (num_inputs,) = module.entry("g_idx", ("I32", "I64"), num_dims=1).shape
            bits = WORD_BITS * num_words // max(1, num_inputs)
        else:
            num_inputs = WORD_BITS * num_words // bits
        if bits not in BITS or num_words * WORD_BITS != num_inputs * bits:
            raise module.error(f"has {num_words} words for {num_inputs} features", "qweight")
        if bits != self._bits and not self._differs:
            raise module.error(
                f"has codes of {bits} bits, but quantization_config states {self._bits}", "qweight"
            )
        if num_inputs % WORD_BITS or num_outputs % WORD_BITS:
            raise module.error(
                f"is packed for {num_outputs} and {num_inputs} features, which must be "
                f"multiples of {WORD_BITS}",
                "qweight",
            )
        num_groups = group_count(
            module,
            "scales",
            scales.shape[0],
            num_inputs,
            self._group_sizes,
            is_indexed="g_idx" in module.entries,
        )
        module.expect_shape("scales", (num_groups, num_outputs))
        module.entry("qzeros", ("I32",), num_dims=2)
        module.expect_shape("qzeros", (num_groups, num_outputs * bits // WORD_BITS))
        return num_outputs, num_inputs

    def open(self, module: ModuleTensors, read: Read) -> IntegerWeight:
        """Return the weight."""
        num_outputs, num_inputs = self.shape(module, read)
        words = read(f"{module.prefix}qweight")
        bits = WORD_BITS * words.shape[0] // num_inputs
        scales = read(f"{module.prefix}scales").T.contiguous()
        return IntegerWeight(
            shape=(num_outputs, num_inputs),
            bits=bits,
            codes=lambda rows: unpack(words[:, rows].T.contiguous(), bits),
            scales=scales,
            zeros=self._zeros(read(f"{module.prefix}qzeros"), bits),
            groups=_groups(module, read, scales.shape[1], num_inputs),
        )

    def _zeros(self, words: torch.Tensor, bits: int) -> torch.Tensor | int:
        """Return the zero points, int16 [O, G], or one number if all of them are the middle code.

        words: as the checkpoint stores them.
        """
        ones = torch.tensor(_ONES[bits])
        is_by_code = bits == 3 and not self._subtracts_words
        if self._stores_less and not is_by_code:
            # The sum of unsigned words; a carry beyond the last bit is dropped.
            all_ones = ones.repeat(words.shape[1] // len(ones))
            words = (words.to(torch.int64) + all_ones).to(torch.int32)
        middle = 1 << bits - 1
        if len(ones) == 1:
            # The word of middle codes as a signed number. Most checkpoints have no other.
            word = int(ones) * middle - (1 << WORD_BITS)
            if bool((words == word).all()):
                return middle
        zeros = unpack(words, bits)
        if self._stores_less and is_by_code:
            zeros = zeros + 1 & (1 << bits) - 1
        return middle if bool((zeros == middle).all()) else zeros.T.contiguous().to(torch.int16)


def _read_group_sizes(table: Mapping[str, Any]) -> frozenset[int]:
    """Return the group sizes of all modules, empty if the configuration does not state them."""
    size, changes = read_group_size(table), table.get("dynamic")
    if size is None:
        return frozenset()
    parts = changes.values() if isinstance(changes, Mapping) else ()
    others = (read_group_size(part) for part in parts if isinstance(part, Mapping))
    return frozenset({size, *(other for other in others if other is not None)})


def _groups(
    module: ModuleTensors, read: Read, num_groups: int, num_inputs: int
) -> torch.Tensor | None:
    """Return the group index of each feature, or None if groups are consecutive features."""
    if "g_idx" not in module.entries:
        return None
    groups = read(f"{module.prefix}g_idx").to(torch.int64)
    regular = torch.arange(num_inputs) // (num_inputs // num_groups)
    if num_inputs % num_groups == 0 and torch.equal(groups, regular):
        return None
    if int(groups.min()) < 0 or int(groups.max()) >= num_groups:
        raise module.error(f"names a group that is not one of the {num_groups} groups", "g_idx")
    return groups
