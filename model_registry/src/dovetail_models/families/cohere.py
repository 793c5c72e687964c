"""Command R and Aya. Source: https://docs.cohere.com/docs/command-r and its reference code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from dovetail.interfaces.model import WeightMapping
from dovetail_models.config_reader import Config, read_flag, read_number
from dovetail_models.decoder import (
    AttentionOptions,
    DecoderForCausalLM,
    DecoderShape,
    ParallelBlock,
    layer_norm,
    read_decoder_shape,
    read_heads,
    read_rope,
)
from dovetail_models.decoder.names import rotary_pairs
from dovetail_models.decoder.norms import norm_with_weights_of_heads
from dovetail_models.sliding_windows import read_layer_types, read_windows_of

THETA = 500_000.0


class CohereForCausalLM(DecoderForCausalLM):
    """Command R and Aya: parallel branches, layer norms, rotary pairs, scaled logits."""

    architectures: ClassVar[tuple[str, ...]] = ("CohereForCausalLM",)

    @staticmethod
    def read_shape(config: Config) -> DecoderShape:
        """Return the shape defined by config.json."""
        size = read_heads(config).head_size
        rope = read_rope(config, size, theta=THETA, whole_heads=True)
        return _read_shape(config, rope=rope)

    def map_weights(self, shape: DecoderShape) -> Sequence[WeightMapping]:
        """Return the weight mappings, which declare the layouts of the checkpoint."""
        size = shape.heads.head_size
        return tuple(rotary_pairs(size, size, ("q_proj", "k_proj", "q_norm", "k_norm")))


class Cohere2ForCausalLM(CohereForCausalLM):
    """Command R7B: layers with a sliding window have rotary positions, the others have none."""

    architectures: ClassVar[tuple[str, ...]] = ("Cohere2ForCausalLM",)

    @staticmethod
    def read_shape(config: Config) -> DecoderShape:
        """Return the shape defined by config.json."""
        kinds = read_layer_types(config, pattern=4)
        windows = read_windows_of(config, kinds)
        size = read_heads(config).head_size
        rope = read_rope(config, size, theta=THETA, whole_heads=True)
        ropes = tuple(rope if window else None for window in windows)
        return _read_shape(config, windows=windows, ropes=ropes)


def _read_shape(config: Config, **changes: Any) -> DecoderShape:
    bias = read_flag(config, "attention_bias")
    eps = read_number(config, "layer_norm_eps", 1e-5)
    has_head_norm = read_flag(config, "use_qk_norm")
    return read_decoder_shape(
        config,
        norm=layer_norm(eps, has_bias=False),
        tied=read_flag(config, "tie_word_embeddings", default=True),
        block=ParallelBlock,
        logit_scale=read_number(config, "logit_scale", 0.0625),
        attention=AttentionOptions(
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=norm_with_weights_of_heads(eps) if has_head_norm else None,
        ),
        **changes,
    )
