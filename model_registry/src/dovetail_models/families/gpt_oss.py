"""gpt-oss. Source: OpenAI 2025, arXiv:2508.10925."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from dovetail.interfaces.ops import ExpertRouting
from dovetail_models.config_reader import (
    Config,
    read_count,
    read_flag,
    read_number,
)
from dovetail_models.decoder import (
    AttentionOptions,
    DecoderForCausalLM,
    DecoderShape,
    ExpertOptions,
    Rope,
    read_decoder_shape,
    read_heads,
    read_num_experts,
    read_rope,
    read_top_k,
    rms_norm,
    sparse_mlp,
)
from dovetail_models.decoder.names import LAYER, at_layer, interleaved_experts
from dovetail_models.sliding_windows import read_layer_types, read_windows_of

DEFAULT_WINDOW = 128
DEFAULT_ROPE: Mapping[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""The RoPE parameters of models whose config.json has none."""


class GptOssForCausalLM(DecoderForCausalLM):
    """gpt-oss: experts with biases and clamped activations; attention with sinks."""

    architectures: ClassVar[tuple[str, ...]] = ("GptOssForCausalLM",)
    example_config: ClassVar[Mapping[str, Any]] = {"num_local_experts": 4, "head_dim": 16}

    @staticmethod
    def read_shape(config: Config) -> DecoderShape:
        """Return the shape defined by config.json."""
        bias = read_flag(config, "attention_bias", default=True)
        heads, num_experts = read_heads(config, head_size=64), read_num_experts(config, 128)
        inner = read_count(config, "intermediate_size")
        experts = ExpertOptions(
            num_experts=num_experts,
            intermediate_size=inner,
            routing=ExpertRouting(top_k=read_top_k(config, num_experts, 4), renormalize=True),
            bias=True,
            limit=read_number(config, "swiglu_limit", 7.0),
            alpha=read_number(config, "swiglu_alpha", 1.702),
            router_bias=True,
            router_name="router",
        )
        window = {"sliding_window": DEFAULT_WINDOW}
        return read_decoder_shape(
            config,
            heads=heads,
            windows=read_windows_of(window | dict(config), read_layer_types(config, pattern=2)),
            rope=_read_rope(config, heads.head_size),
            norm=rms_norm(read_number(config, "rms_norm_eps", 1e-5)),
            attention=AttentionOptions(qkv_bias=bias, output_bias=bias, sinks=True),
            num_experts=num_experts,
            mlp=sparse_mlp(experts),
            mappings=(
                *at_layer(LAYER, {"self_attn.sinks": "self_attn.attn.sinks"}),
                *interleaved_experts(f"{LAYER}.mlp.experts", num_experts, inner),
            ),
        )


def _read_rope(config: Config, head_size: int) -> Rope:
    if not config.get("rope_parameters") and not config.get("rope_scaling"):
        config = {**config, "rope_scaling": DEFAULT_ROPE}
    return read_rope(config, head_size, theta=150_000.0, whole_heads=True)
