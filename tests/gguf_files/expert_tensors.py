"""The tensors of experts and of latent attention, by the rules of llama.cpp's converter.

Source: https://github.com/ggml-org/llama.cpp/blob/master/convert_hf_to_gguf.py
Dimensions: E experts, O output features, I input features, H heads, N features of a key without
position, V features of a value, L latent features.
"""

from __future__ import annotations

from typing import Any

import torch

from gguf_files.conversion import Conversion


def converted(
    conversion: Conversion, config: Any, name: str, parameter: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the tensors of the file that contain a parameter, as views, by checkpoint names."""
    if ".experts." in name:
        return _experts(conversion, name, parameter)
    if name.endswith("kv_b_proj.weight") and conversion.splits_latent:
        return _latent_heads(config, name, parameter)
    if name.endswith(".sinks"):
        return {f"{name}.weight": parameter}
    if name.endswith("e_score_correction_bias"):
        return {f"{name.removesuffix('_bias')}.bias": parameter}
    if name.endswith("shared_expert_gate.weight"):
        return {name: parameter.squeeze(0)}
    return {name: parameter}


def _experts(conversion: Conversion, name: str, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return weights [E, O, I] or biases [E, O]. Gate and up become separate tensors."""
    stem = name.removesuffix("_bias")
    leaf = "weight" if stem == name else "bias"
    if conversion.transposes_experts and leaf == "weight":
        parameter = parameter.mT
    if not stem.endswith("gate_up_proj"):
        return {f"{stem}.{leaf}": parameter}
    stem = stem.removesuffix("gate_up_proj")
    alternates = conversion.experts == "alternating"
    halves = (parameter[:, ::2], parameter[:, 1::2]) if alternates else parameter.chunk(2, dim=1)
    return dict(zip((f"{stem}gate_proj.{leaf}", f"{stem}up_proj.{leaf}"), halves, strict=True))


def _latent_heads(config: Any, name: str, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the keys [H, L, N] and the values [H, V, L]."""
    sizes = (config.qk_nope_head_dim, config.v_head_dim)
    heads = parameter.unflatten(0, (config.num_attention_heads, -1))
    keys, values = heads.split(sizes, dim=1)
    return {name.replace("kv_b", "k_b"): keys.mT, name.replace("kv_b", "v_b"): values}
