"""OLMoE. Source: Muennighoff et al. 2024, arXiv:2409.02060."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from dovetail.interfaces.model import WeightMapping
from dovetail.interfaces.ops import ExpertRouting
from dovetail_models.config_reader import Config, read_count, read_flag, read_number, read_optional
from dovetail_models.decoder import (
    AttentionOptions,
    DecoderForCausalLM,
    DecoderShape,
    ExpertOptions,
    norm_of_all_heads,
    read_decoder_shape,
    read_num_experts,
    read_top_k,
    rms_norm,
    sparse_mlp,
)
from dovetail_models.decoder.names import stacked_experts


class OlmoeForCausalLM(DecoderForCausalLM):
    """OLMoE: Llama with experts, and norms over all heads of queries and keys."""

    architectures: ClassVar[tuple[str, ...]] = ("OlmoeForCausalLM",)
    example_config: ClassVar[Mapping[str, Any]] = {"num_experts": 6, "num_experts_per_tok": 3}

    @staticmethod
    def read_shape(config: Config) -> DecoderShape:
        """Return the shape defined by config.json."""
        eps = read_number(config, "rms_norm_eps", 1e-5)
        bias, num_experts = read_flag(config, "attention_bias"), read_num_experts(config, 64)
        options = ExpertOptions(
            num_experts=num_experts,
            intermediate_size=read_count(config, "intermediate_size"),
            routing=ExpertRouting(
                top_k=read_top_k(config, num_experts, 8),
                renormalize=read_flag(config, "norm_topk_prob"),
            ),
        )
        return read_decoder_shape(
            config,
            norm=rms_norm(eps),
            attention=AttentionOptions(
                qkv_bias=bias,
                output_bias=bias,
                clip=read_optional(config, "clip_qkv"),
                clips_normal=True,
                qk_norm=norm_of_all_heads(eps),
            ),
            num_experts=num_experts,
            mlp=sparse_mlp(options),
        )

    def map_weights(self, shape: DecoderShape) -> Sequence[WeightMapping]:
        """Return the mappings for transformers' module names. The hub's checkpoints need none."""
        return tuple(stacked_experts("model.layers.{}.mlp.experts", shape.num_experts))
