"""Qwen 3. Source: Yang et al. 2025, arXiv:2505.09388.

Dimensions: T tokens, D hidden size, H query heads, K key-value heads, S head size.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from dovetail.interfaces.model import ModelContext
from dovetail_models.config_reader import Config, read_flag
from dovetail_models.models.decoder import (
    DecoderAttention,
    DecoderForCausalLM,
    DecoderShape,
    read_decoder_shape,
)
from dovetail_models.sliding_windows import read_qwen_windows
from dovetail_torch.layers import RMSNorm, RotaryEmbedding

DEFAULT_HEAD_SIZE = 128


class Qwen3Attention(DecoderAttention):
    """Attention with RMS norms on the queries and keys of each head."""

    def __init__(
        self,
        context: ModelContext,
        name: str,
        shape: DecoderShape,
        rotary: RotaryEmbedding,
        index: int,
    ) -> None:
        super().__init__(context, name, shape, rotary, index)
        self.q_norm = RMSNorm(context, shape.heads.head_size, shape.norm_eps)
        self.k_norm = RMSNorm(context, shape.heads.head_size, shape.norm_eps)

    def project(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return normalized q [T, H, S] and k [T, K, S], and v [T, K, S]."""
        q_THS, k_TKS, v_TKS = super().project(x_TD)
        return self.q_norm(q_THS), self.k_norm(k_TKS), v_TKS


class Qwen3ForCausalLM(DecoderForCausalLM):
    """Qwen 2 with norms on queries and keys. q, k and v have biases only with `attention_bias`."""

    architectures: ClassVar[tuple[str, ...]] = ("Qwen3ForCausalLM",)
    attention_cls: ClassVar[type[DecoderAttention]] = Qwen3Attention

    @staticmethod
    def read_shape(config: Config) -> DecoderShape:
        """Return the shape defined by config.json."""
        if config.get("head_dim") is None:
            config = {**config, "head_dim": DEFAULT_HEAD_SIZE}
        bias = read_flag(config, "attention_bias")
        windows = read_qwen_windows(config)
        return read_decoder_shape(config, windows=windows, qkv_bias=bias, output_bias=bias)
