"""Compares the sizes in the metadata of a GGUF file with the shapes of its tensors.

The model is created from the metadata before its weights are read. With these checks, a file cannot
cause a model to be created that is larger than the file's tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dovetail.errors import ModelError
from dovetail_gguf.metadata_fields import Fields

_LAYER = re.compile(r"blk\.(?P<number>\d{1,9})\.(?P<leaf>\w+\.weight)")


def check_shapes(fields: Fields, config: Mapping[str, Any], head_dim: int) -> None:
    """Raise ModelError, naming file and key, if a size contradicts a tensor or another size.

    config: the fields of config.json. head_dim: the head size that the metadata states. With
    multi-head latent attention, head sizes are not compared.
    """
    num_heads = fields.integer("attention.head_count")
    num_kv_heads = fields.integer("attention.head_count_kv", default=num_heads)
    length = (0, config["hidden_size"], "embedding_length")
    # Leaf of a tensor: dimension, expected size, keys of the metadata.
    expected = {
        "ffn_down.weight": (
            length,
            (1, fields.integer("feed_forward_length"), "feed_forward_length"),
        )
    }
    if "kv_lora_rank" not in config and num_heads:
        _check_heads(fields, num_heads, num_kv_heads)
        keys = f"attention.head_count × head size {head_dim}"
        expected["attn_output.weight"] = (length, (1, num_heads * head_dim, keys))
        keys = f"attention.head_count_kv × head size {head_dim}"
        expected["attn_k.weight"] = ((0, num_kv_heads * head_dim, keys),)
    required = _shared_sizes(config)
    expected |= {leaf: (check,) for leaf, check in required.items()}
    _check_size(fields, "token_embd.weight", 1, config["hidden_size"], "embedding_length")
    layers, leaves = set(), set()
    for name in fields.file.tensors:
        if match := _LAYER.fullmatch(name):
            layers.add(int(match["number"]))
            leaves.add(match["leaf"])
            for check in expected.get(match["leaf"], ()):
                _check_size(fields, name, *check)
    missing = next((n for n in range(config["num_hidden_layers"]) if n not in layers), None)
    if missing is not None:
        raise ModelError(
            f"{fields.file.path} has no tensors of layer {missing} (blk.{missing}), but "
            f"{fields.name}.block_count is {fields.integer('block_count')}. The file is "
            "incomplete; download it again."
        )
    for leaf, (_, size, key) in required.items():
        if leaf not in leaves:
            raise ModelError(
                f"{fields.file.path} has no tensor {leaf} in any layer, but the metadata "
                f"({fields.name}.{key}) state the size {size}."
            )


def _shared_sizes(config: Mapping[str, Any]) -> dict[str, tuple[int, int, str]]:
    """Return dimension, size and keys by the leaf of a tensor that the model needs.

    These are the tensors of shared experts and of compressed queries.
    """
    sizes = {}
    if size := config.get("shared_expert_intermediate_size"):
        sizes["ffn_down_shexp.weight"] = (1, size, "expert_shared_feed_forward_length")
    is_dense = config.get("first_k_dense_replace", 0) >= config["num_hidden_layers"]
    if (count := config.get("n_shared_experts")) and not is_dense:
        size = count * config["moe_intermediate_size"]
        key = "expert_shared_count × expert_feed_forward_length"
        sizes["ffn_down_shexp.weight"] = (1, size, key)
    if rank := config.get("q_lora_rank"):
        sizes["attn_q_a.weight"] = (0, rank, "attention.q_lora_rank")
    return sizes


def check_rotary_size(fields: Fields, head_dim: int, *, is_partial: bool) -> None:
    """Raise ModelError if rope.dimension_count does not fit the head size.

    is_partial: whether only a part of each head may rotate.
    """
    if fields.get("rope.dimension_count") is None:
        return
    size = fields.integer("rope.dimension_count")
    # Models without RoPE may have an odd head size, and some files state it here.
    is_valid = size <= head_dim and not size % 2 if is_partial else size == head_dim
    if not is_valid:
        rule = "even and at most" if is_partial else "equal to"
        raise ModelError(
            f"{fields.file.path}: {fields.name}.rope.dimension_count is {size}; it must be {rule} "
            f"the head size {head_dim}."
        )


def _check_heads(fields: Fields, num_heads: int, num_kv_heads: int) -> None:
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ModelError(
            f"{fields.file.path}: {fields.name}.attention.head_count is {num_heads}, which is not "
            f"a multiple of {fields.name}.attention.head_count_kv ({num_kv_heads})."
        )


def _check_size(fields: Fields, name: str, dimension: int, size: int, key: str) -> None:
    """Compare one dimension of a matrix with the size that the metadata states.

    Files may omit the number of rows of a matrix with one row.
    """
    shape = fields.file.tensors[name].shape
    shape = (1, *shape) if len(shape) == 1 else shape
    if len(shape) == 2 and shape[dimension] != size:
        raise ModelError(
            f"{fields.file.path}: {name} has the shape {list(shape)}, but the metadata "
            f"({fields.name}.{key}) require {size} {'columns' if dimension else 'rows'}."
        )
