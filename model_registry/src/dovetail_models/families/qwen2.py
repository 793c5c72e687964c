"""Qwen 2 and 2.5. Source: Yang et al. 2024, arXiv:2407.10671."""

from __future__ import annotations

from typing import ClassVar

from dovetail_models.config_reader import Config
from dovetail_models.decoder import (
    AttentionOptions,
    DecoderForCausalLM,
    DecoderShape,
    read_decoder_shape,
)
from dovetail_models.sliding_windows import read_qwen_windows


class Qwen2ForCausalLM(DecoderForCausalLM):
    """Qwen 2: Llama with biases on q, k and v. Some layers may have a sliding window."""

    architectures: ClassVar[tuple[str, ...]] = ("Qwen2ForCausalLM",)

    @staticmethod
    def read_shape(config: Config) -> DecoderShape:
        """Return the shape defined by config.json."""
        return read_decoder_shape(
            config,
            windows=read_qwen_windows(config),
            attention=AttentionOptions(qkv_bias=True),
        )
