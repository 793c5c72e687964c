"""The rules of llama.cpp's converter for one family of models.

Source: https://github.com/ggml-org/llama.cpp/blob/master/convert_hf_to_gguf.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gguf.constants import MODEL_ARCH

from parity.family_checkpoints import FAMILIES, Family


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """The rules for a family. architecture: its name in the gguf package.

    family: the checkpoint. qkv: the order of a fused weight: "" as in the checkpoint, "heads" for
    q, k, v of each head, "groups" for the queries of each group with its key and value.
    is_permuted: whether rotary halves become pairs. transposed: endings of names that are stored
    as [in, out]. norm_offset: added to norms. keys: metadata, by name without the architecture;
    a string is the name of a field of the config.
    experts: the order of gate and up in the experts of the checkpoint, "halves" or "alternating".
    transposes_experts: whether the checkpoint stores experts as [in, out]. splits_latent: whether
    kv_b_proj becomes two tensors.
    """

    architecture: MODEL_ARCH
    family: Family
    qkv: str = ""
    is_permuted: bool = False
    transposed: tuple[str, ...] = ()
    norm_offset: float = 0.0
    keys: Mapping[str, Any] = field(default_factory=dict)
    experts: str = "halves"
    transposes_experts: bool = False
    splits_latent: bool = False


def changed(name: str, **changes: Any) -> Family:
    """Return a family of the parity tests with other fields."""
    family = FAMILIES[name]
    return Family(
        model=family.model,
        config=family.config,
        fields={**family.fields, **changes},
        max_len=family.max_len,
        attention=family.attention,
    )
