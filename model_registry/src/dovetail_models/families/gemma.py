"""Gemma 1. Source: Gemma team 2024, arXiv:2403.08295."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from dovetail_models.config_reader import (
    Config,
    read_choice,
    read_count,
    read_flag,
    read_number,
    reject,
)
from dovetail_models.decoder import (
    AttentionOptions,
    DecoderForCausalLM,
    DecoderShape,
    offset_rms_norm,
    read_decoder_shape,
    read_heads,
)
from dovetail_models.decoder.shape import GELU_TANH_NAMES


class GemmaForCausalLM(DecoderForCausalLM):
    """Gemma: Llama with scaled embeddings, norms that multiply by 1 + weight, and a tanh GELU."""

    architectures: ClassVar[tuple[str, ...]] = ("GemmaForCausalLM",)
    example_config: ClassVar[Mapping[str, Any]] = {"hidden_act": "gelu_pytorch_tanh"}

    @staticmethod
    def read_shape(config: Config) -> DecoderShape:
        """Return the shape defined by config.json."""
        # "gelu" in early config.json files means the tanh approximation, as in transformers.
        activation = read_choice(config, "hidden_act", (*GELU_TANH_NAMES, "gelu"))
        return read_gemma_shape(config, activation=_tanh(activation))


def read_gemma_shape(config: Config, **changes: Any) -> DecoderShape:
    """Return the shape of a Gemma model of any version. changes: fields of `DecoderShape`."""
    reject(config, "use_bidirectional_attention")
    bias = read_flag(config, "attention_bias")
    hidden_size = read_count(config, "hidden_size")
    fields = {
        "heads": read_heads(config, head_size=256),
        "norm": offset_rms_norm(read_number(config, "rms_norm_eps", 1e-6)),
        "tied": read_flag(config, "tie_word_embeddings", default=True),
        "attention": AttentionOptions(qkv_bias=bias, output_bias=bias),
        "embedding_scale": hidden_size**0.5,
    }
    return read_decoder_shape(config, **(fields | changes))


def _tanh(name: str) -> str:
    return GELU_TANH_NAMES[0] if name == "gelu" else name
