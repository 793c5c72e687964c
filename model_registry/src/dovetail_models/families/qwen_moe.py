"""Qwen2-MoE and Qwen3-MoE. Sources: Yang et al. 2024, arXiv:2407.10671; 2025, arXiv:2505.09388."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from dovetail.interfaces.model import WeightMapping
from dovetail.interfaces.ops import ExpertRouting
from dovetail_models.config_reader import (
    Config,
    read_count,
    read_flag,
    read_num_layers,
    read_number,
)
from dovetail_models.decoder import (
    AttentionOptions,
    DecoderForCausalLM,
    DecoderShape,
    ExpertOptions,
    GatedMLP,
    norm_of_each_head,
    read_decoder_shape,
    read_heads,
    read_num_experts,
    read_sparse_layers,
    read_top_k,
    rms_norm,
    sparse_mlp,
)
from dovetail_models.decoder.names import stacked_experts
from dovetail_models.sliding_windows import DEFAULT_MAX_WINDOW_LAYERS, read_qwen_windows

EXAMPLE_CONFIG: Mapping[str, int] = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}
"""The fields of a small example configuration."""


class _QwenMoe(DecoderForCausalLM):
    """The common code of Qwen models with experts in some layers, and dense MLPs in the others."""

    def map_weights(self, shape: DecoderShape) -> Sequence[WeightMapping]:
        """Return the mappings for transformers' module names. The hub's checkpoints need none."""
        return tuple(stacked_experts("model.layers.{}.mlp.experts", shape.num_experts))


class Qwen2MoeForCausalLM(_QwenMoe):
    """Qwen 2 with experts, and a shared expert with a gate."""

    architectures: ClassVar[tuple[str, ...]] = ("Qwen2MoeForCausalLM",)
    example_config: ClassVar[Mapping[str, Any]] = {
        **EXAMPLE_CONFIG,
        "shared_expert_intermediate_size": 40,
    }

    @staticmethod
    def read_shape(config: Config) -> DecoderShape:
        """Return the shape defined by config.json."""
        shared_size = read_count(config, "shared_expert_intermediate_size", 5632)
        return read_decoder_shape(
            config,
            windows=_qwen2_windows(config),
            attention=AttentionOptions(qkv_bias=read_flag(config, "qkv_bias", default=True)),
            **read_qwen_experts(config, defaults=(60, 4, 1408), shared_size=shared_size),
        )


class Qwen3MoeForCausalLM(_QwenMoe):
    """Qwen 3 with experts."""

    architectures: ClassVar[tuple[str, ...]] = ("Qwen3MoeForCausalLM",)
    example_config: ClassVar[Mapping[str, Any]] = EXAMPLE_CONFIG

    @staticmethod
    def read_shape(config: Config) -> DecoderShape:
        """Return the shape defined by config.json."""
        bias = read_flag(config, "attention_bias")
        norm = rms_norm(read_number(config, "rms_norm_eps", 1e-6))
        window, num_layers = 0, read_num_layers(config)
        if read_flag(config, "use_sliding_window") and config.get("sliding_window") is not None:
            window = read_count(config, "sliding_window")
        return read_decoder_shape(
            config,
            heads=read_heads(config),
            windows=(window,) * num_layers,
            norm=norm,
            attention=AttentionOptions(
                qkv_bias=bias, output_bias=bias, qk_norm=norm_of_each_head(norm)
            ),
            **read_qwen_experts(config, defaults=(128, 8, 768)),
        )


def _qwen2_windows(config: Config) -> tuple[int, ...]:
    """Return the window of each layer.

    Without layer_types, layers with an even index below max_window_layers have a window.
    """
    if config.get("layer_types") is not None or not read_flag(config, "use_sliding_window"):
        return read_qwen_windows(config)
    end = read_count(config, "max_window_layers", DEFAULT_MAX_WINDOW_LAYERS, minimum=0)
    kinds = [
        "full_attention" if index % 2 or index >= end else "sliding_attention"
        for index in range(read_num_layers(config))
    ]
    return read_qwen_windows({**config, "layer_types": kinds})


def read_qwen_experts(
    config: Config,
    *,
    defaults: tuple[int, int, int],
    shared_size: int = 0,
    renormalize: bool = False,
) -> dict[str, Any]:
    """Return the experts' fields of the shape.

    defaults: number of experts, experts per token, their size. renormalize: the default of
    norm_topk_prob.
    """
    num_experts = read_num_experts(config, defaults[0])
    options = ExpertOptions(
        num_experts=num_experts,
        intermediate_size=read_count(config, "moe_intermediate_size", defaults[2]),
        routing=ExpertRouting(
            top_k=read_top_k(config, num_experts, defaults[1]),
            renormalize=read_flag(config, "norm_topk_prob", default=renormalize),
        ),
        shared_size=shared_size,
        shared_gate=bool(shared_size),
    )
    sparse = read_sparse_layers(config, read_num_layers(config))
    mlp = sparse_mlp(options)
    return {
        "num_experts": num_experts,
        "mlps": tuple(mlp if has_experts else GatedMLP for has_experts in sparse),
    }
