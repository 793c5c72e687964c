"""StableLM 3B and 2. Source: Bellagente et al. 2024, arXiv:2402.17834."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from dovetail.interfaces.model import WeightMapping
from dovetail_models.config_reader import Config, read_flag, read_number
from dovetail_models.decoder import (
    AttentionOptions,
    DecoderForCausalLM,
    DecoderShape,
    ParallelBlock,
    PreNormBlock,
    layer_norm,
    read_decoder_shape,
    read_heads,
    read_rope,
)
from dovetail_models.decoder.names import at_layer
from dovetail_models.decoder.norms import norms_by_head


class StableLmForCausalLM(DecoderForCausalLM):
    """StableLM: layer norms and partial rotary.

    StableLM 2 12B has parallel branches and a norm per head.
    """

    architectures: ClassVar[tuple[str, ...]] = ("StableLmForCausalLM",)

    @staticmethod
    def read_shape(config: Config) -> DecoderShape:
        """Return the shape defined by config.json."""
        heads = read_heads(config)
        eps = read_number(config, "layer_norm_eps", 1e-5)
        is_parallel = read_flag(config, "use_parallel_residual")
        has_head_norm = read_flag(config, "qk_layernorm")
        return read_decoder_shape(
            config,
            heads=heads,
            rope=read_rope(config, heads.head_size, share=0.25),
            norm=layer_norm(eps),
            block=ParallelBlock if is_parallel else PreNormBlock,
            attention=AttentionOptions(
                qkv_bias=read_flag(config, "use_qkv_bias"),
                qk_norm=norms_by_head(eps) if has_head_norm else None,
            ),
        )

    def map_weights(self, shape: DecoderShape) -> Sequence[WeightMapping]:
        """Return the weight mappings."""
        names = {
            "self_attn.q_layernorm": "self_attn.q_norm",
            "self_attn.k_layernorm": "self_attn.k_norm",
        }
        return tuple(at_layer("model.layers.{}", names))
