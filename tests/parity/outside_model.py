"""A third-party model that consists of attention layers and an LM head, without an MLP.

It declares support for tensor parallelism and contains no other code for it. Dimensions: T tokens,
S sampled positions, D hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from dovetail.interfaces import AttentionContext, ModelContext
from dovetail_torch import layers


class AttentionOnly(nn.Module):
    """Two layers of x ← x + Attention(RMSNorm(x))."""

    architectures: ClassVar[tuple[str, ...]] = ("AttentionOnly",)
    provides: ClassVar[frozenset[str]] = frozenset({"tensor_parallel"})

    def __init__(self, context: ModelContext) -> None:
        super().__init__()
        vocab_size, size = context.hf_config["vocab_size"], context.hf_config["hidden_size"]
        heads = layers.HeadShape(num_heads=4, num_kv_heads=2, head_size=size // 4)
        self.embed = layers.VocabParallelEmbedding(context, vocab_size, size)
        self.rotary = layers.RotaryEmbedding(context, heads.head_size)
        self.layers = nn.ModuleList()
        for index in range(2):
            layer = nn.Module()
            name = f"layers.{index}"
            layer.norm = layers.RMSNorm(context, size, 1e-6)
            layer.qkv_proj = layers.QKVParallelLinear(context, f"{name}.qkv_proj", size, heads)
            layer.o_proj = layers.RowParallelLinear(
                context, f"{name}.o_proj", size, size, bias=True
            )
            layer.attn = layers.Attention(heads, index)
            self.layers.append(layer)
        self.lm_head = layers.ParallelLMHead(context, "lm_head", vocab_size, size)

    def forward(
        self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, attention: AttentionContext
    ) -> torch.Tensor:
        """Return the hidden states, [T, D]."""
        x_TD = self.embed(input_ids_T)
        for layer in self.layers:
            q, k, v = layer.qkv_proj.split(layer.qkv_proj(layer.norm(x_TD)))
            q, k = self.rotary(q, k, positions_T)
            x_TD = x_TD + layer.o_proj(layer.attn(q, k, v, attention))
        return x_TD

    def compute_logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """Return the logits, [S, V]."""
        return self.lm_head(hidden_SD)
