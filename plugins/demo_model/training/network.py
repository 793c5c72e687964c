"""The Llama network for training: float32 weights with the names of Hugging Face checkpoints.

Contract: `Llama(shape)` maps packed rows of ids to hidden states; its `state_dict` loads into
`transformers.LlamaForCausalLM`. Tokens attend only to their own conversation, even if a row
contains several conversations. The network has no KV cache, because it is used only for training.
Papers: Touvron et al. 2023 (Llama); Su et al. 2021 (rotary embedding); Ainslie et al. 2023 (GQA).

Shapes: B rows, L tokens of a row, T = B * L, D hidden, H heads, K key-value heads, E head size,
F intermediate size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a Llama network."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int = 64
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    max_positions: int = 1024


class RMSNorm(nn.Module):
    """Scales each vector to root mean square 1, then by a learned weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Normalize the last dimension in float32."""
        x = x_BLD.float()
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return x * scale * self.weight


def rotate(x_BHLE: Tensor, cos_LE: Tensor, sin_LE: Tensor) -> Tensor:
    """Apply the rotary embedding in the half-split form of Hugging Face."""
    first, second = x_BHLE.chunk(2, dim=-1)
    return x_BHLE * cos_LE + torch.cat((-second, first), dim=-1) * sin_LE


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        queries = shape.num_heads * shape.head_size
        keys = shape.num_kv_heads * shape.head_size
        self.q_proj = nn.Linear(shape.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=False)

    def forward(self, x_BLD: Tensor, rope: tuple[Tensor, Tensor], mask_B1LL: Tensor) -> Tensor:
        """Return the attention output, [B, L, D]. `mask` is True where a query may attend."""
        b, length, _ = x_BLD.shape
        size, heads, kv_heads = self.shape.head_size, self.shape.num_heads, self.shape.num_kv_heads
        q = self.q_proj(x_BLD).view(b, length, heads, size).transpose(1, 2)
        k = self.k_proj(x_BLD).view(b, length, kv_heads, size).transpose(1, 2)
        v = self.v_proj(x_BLD).view(b, length, kv_heads, size).transpose(1, 2)
        q, k = rotate(q, *rope), rotate(k, *rope)
        groups = heads // kv_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        # On a CPU with a mask, this is twice as fast here as the fused operator.
        scores = q @ k.transpose(-1, -2) * size**-0.5
        out = scores.masked_fill(~mask_B1LL, -1e4).softmax(-1) @ v
        return self.o_proj(out.transpose(1, 2).reshape(b, length, heads * size))


class MLP(nn.Module):
    """The SwiGLU MLP: gate, up and down projection."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Return the MLP output, [B, L, D]."""
        return self.down_proj(functional.silu(self.gate_proj(x_BLD)) * self.up_proj(x_BLD))


class Layer(nn.Module):
    """One pre-norm decoder layer: attention, then the MLP, each with a residual connection."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)

    def forward(self, x_BLD: Tensor, rope: tuple[Tensor, Tensor], mask_B1LL: Tensor) -> Tensor:
        """Return the hidden states after this layer, [B, L, D]."""
        x_BLD = x_BLD + self.self_attn(self.input_layernorm(x_BLD), rope, mask_B1LL)
        return x_BLD + self.mlp(self.post_attention_layernorm(x_BLD))


class Trunk(nn.Module):
    """The part of the network that checkpoints call `model`: embedding, layers, last norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)


class Llama(nn.Module):
    """The whole network. The embedding is also the output layer (tied)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Trunk(shape)
        exponents = torch.arange(0, shape.head_size, 2) / shape.head_size
        angles = torch.outer(torch.arange(shape.max_positions), shape.rope_theta**-exponents)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                scale = (2 * shape.num_layers) ** -0.5 if "o_proj" in name or "down" in name else 1
                nn.init.normal_(weight, std=0.02 * scale)

    def forward(self, ids_BL: Tensor, owner_BL: Tensor) -> Tensor:
        """Return hidden states (B, L, D), after the last norm.

        owner_BL: the index of each token's conversation within its row. Positions are counted from
        the start of the row. Rotary attention depends only on distances between positions, so this
        gives the same result as positions from the start of each conversation.
        """
        length = ids_BL.shape[1]
        causal_LL = torch.ones(length, length, dtype=torch.bool, device=ids_BL.device).tril()
        mask_BLL = (owner_BL[:, :, None] == owner_BL[:, None, :]) & causal_LL
        rope = (self.cos[:length], self.sin[:length])
        x_BLD = self.model.embed_tokens(ids_BL)
        for layer in self.model.layers:
            x_BLD = layer(x_BLD, rope, mask_BLL[:, None])
        return self.model.norm(x_BLD)

    def loss(self, hidden_BLD: Tensor, targets_BL: Tensor) -> Tensor:
        """Return the mean cross entropy over the non-negative targets."""
        picked = (targets_BL >= 0).flatten().nonzero().squeeze(1)
        hidden_ND = hidden_BLD.flatten(0, 1)[picked]
        logits_NV = functional.linear(hidden_ND, self.model.embed_tokens.weight)
        return functional.cross_entropy(logits_NV.float(), targets_BL.flatten()[picked])
