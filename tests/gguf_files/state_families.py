"""The rules of llama.cpp's converter for families with recurrent layers.

Source: https://github.com/ggml-org/llama.cpp, `convert_hf_to_gguf.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from gguf.constants import MODEL_ARCH

from gguf_files.conversion import Conversion, changed

_STATE_KEYS = {"ssm.conv_kernel": "conv_kernel", "ssm.state_size": "state_size"}
_ABSENT = dict.fromkeys(
    (
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "rope.dimension_count",
        "rope.freq_base",
        "attention.layer_norm_epsilon",
    )
)
_NEXT = {
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "num_hidden_layers": 4,
}


def _mamba2(**fields: Any) -> Conversion:
    family = changed("mamba2", hidden_size=64, use_bias=False, head_dim=16, num_heads=8, **fields)
    return Conversion(
        architecture=MODEL_ARCH.MAMBA2,
        family=family,
        keys=_STATE_KEYS
        | _ABSENT
        | {
            "context_length": 1 << 20,
            "feed_forward_length": 0,
            "attention.head_count": 0,
            "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
            "ssm.inner_size": 128,
            "ssm.time_step_rank": "num_heads",
            "ssm.group_count": "n_groups",
        },
    )


STATE_CONVERSIONS: Mapping[str, Conversion] = {
    "mamba2": _mamba2(),
    "mamba2, tied": _mamba2(use_conv_bias=False, n_groups=1, tie_word_embeddings=True),
    "qwen3next": Conversion(
        architecture=MODEL_ARCH.QWEN3NEXT,
        family=changed("qwen3_next", **_NEXT),
        norm_offset=1.0,
        keys={
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
            "full_attention_interval": 2,
            "ssm.conv_kernel": "linear_conv_kernel_dim",
            "ssm.state_size": "linear_key_head_dim",
            "ssm.group_count": "linear_num_key_heads",
            "ssm.time_step_rank": "linear_num_value_heads",
            "ssm.inner_size": 64,
        },
    ),
}


def converted_state(config: Any, name: str, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors of the file that contain a parameter of a recurrent layer.

    Other parameters are returned unchanged.
    """
    stem, _, leaf = name.rpartition(".")
    if leaf == "A_log":
        values = -torch.exp(parameter)
        return {name: values[:, None] if config.model_type == "mamba2" else values}
    if leaf == "D":
        return {name: parameter[:, None]}
    if leaf == "dt_bias":
        return {f"{stem}.dt_proj.bias": parameter}
    if name.endswith("conv1d.weight"):
        return {name: parameter.squeeze(1)}
    if name.endswith("mixer.norm.weight"):
        return {name: parameter.view(config.n_groups, -1)}
    if name.endswith("in_proj_qkvz.weight"):
        return _separated(config, stem, parameter)
    return {name: parameter}


def _separated(config: Any, stem: str, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return all queries, keys and values in one tensor, and the gates in another one."""
    repeats = config.linear_num_value_heads // config.linear_num_key_heads
    values = repeats * config.linear_value_head_dim
    sizes = [config.linear_key_head_dim] * 2 + [values] * 2
    groups = parameter.unflatten(0, (config.linear_num_key_heads, -1)).split(sizes, dim=1)
    q, k, v, z = (part.flatten(0, 1) for part in groups)
    module = stem.removesuffix(".in_proj_qkvz")
    return {f"{module}.in_proj_qkv.weight": torch.cat((q, k, v)), f"{module}.in_proj_z.weight": z}
