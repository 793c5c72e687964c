"""Decoder layers: where the norms are, and what the residual adds.

Every block maps (x, residual) to (x, residual): the hidden state is their sum, and the next norm
adds and normalizes in one operation. After its attention, the last layer computes only the tokens
whose outputs are needed. Dimensions: T tokens, D hidden size, O features of all query heads.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import nn

from dovetail.interfaces.model import AttentionContext, ModelContext
from dovetail_models.decoder.attention import AttentionBranch
from dovetail_models.decoder.mlp import GatedMLP
from dovetail_models.decoder.shape import DecoderShape
from dovetail_torch.layers import Norm

State = tuple[torch.Tensor, torch.Tensor | None]
"""x and the residual, [T, D]. None counts as 0."""


class Block(nn.Module):
    """The base of all blocks: attention, MLP, and a norm for each of `norm_names`.

    has_mlp: whether the block has an MLP.
    """

    norm_names: ClassVar[tuple[str, ...]] = ()
    has_mlp: ClassVar[bool] = True
    mlp: nn.Module

    def __init__(
        self, context: ModelContext, name: str, shape: DecoderShape, self_attn: AttentionBranch
    ) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.is_last = self_attn.attn.index == shape.num_layers - 1
        if self.has_mlp:
            make_mlp = shape.mlps[self_attn.attn.index] if shape.mlps else shape.mlp or GatedMLP
            self.mlp = make_mlp(context, f"{name}.mlp", shape)
        self.ops, self.branch_scale = context.ops, shape.branch_scale
        for norm_name in self.norm_names:
            setattr(self, norm_name, shape.norm(context, shape.hidden_size))

    @abstractmethod
    def forward(
        self,
        x_TD: torch.Tensor,
        residual_TD: torch.Tensor | None,
        positions_T: torch.Tensor,
        attention: AttentionContext,
    ) -> State:
        """Return the next x and residual. In the first layer `residual_TD` is None."""

    def attend(
        self, x_TD: torch.Tensor, positions_T: torch.Tensor, attention: AttentionContext
    ) -> torch.Tensor:
        """Return the output of the attention branch for the needed tokens, [T, D]."""
        attended_TO = self.self_attn(x_TD, positions_T, attention)
        return self.scaled(self.self_attn.o_proj(self.narrow(attended_TO, attention)))

    def narrow(self, x_TD: torch.Tensor, attention: AttentionContext) -> torch.Tensor:
        """Return the rows of the needed tokens: all rows, except after the last attention."""
        return attention.narrow(x_TD) if self.is_last else x_TD

    def scaled(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return the output of a branch, multiplied by `branch_scale`."""
        return x_TD if self.branch_scale == 1 else self.ops.scale(x_TD, self.branch_scale)


def add(
    norm: Norm, x_TD: torch.Tensor, residual_TD: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the normalized sum of x and residual, and the sum. None counts as 0."""
    return (norm(x_TD), x_TD) if residual_TD is None else norm.add(x_TD, residual_TD)


def summed(x_TD: torch.Tensor, residual_TD: torch.Tensor | None) -> torch.Tensor:
    """Return x + residual. None counts as 0; the residual may be overwritten."""
    return x_TD if residual_TD is None else residual_TD.add_(x_TD)


class PreNormBlock(Block):
    """h ← h + Attention(norm(h)); h ← h + MLP(norm(h)). Source: GPT-2, Llama."""

    norm_names = ("input_layernorm", "post_attention_layernorm")
    input_layernorm: Norm
    post_attention_layernorm: Norm

    def forward(
        self,
        x_TD: torch.Tensor,
        residual_TD: torch.Tensor | None,
        positions_T: torch.Tensor,
        attention: AttentionContext,
    ) -> State:
        """Return the next x and residual."""
        x_TD, residual_TD = add(self.input_layernorm, x_TD, residual_TD)
        x_TD = self.attend(x_TD, positions_T, attention)
        residual_TD = self.narrow(residual_TD, attention)
        x_TD, residual_TD = self.post_attention_layernorm.add(x_TD, residual_TD)
        return self.scaled(self.mlp(x_TD)), residual_TD


class BranchBlock(Block):
    """h ← h + Branch(norm(h)), without an MLP. Source: Mamba, Gu and Dao 2023, arXiv:2312.00752."""

    norm_names = ("input_layernorm",)
    has_mlp = False
    input_layernorm: Norm

    def forward(
        self,
        x_TD: torch.Tensor,
        residual_TD: torch.Tensor | None,
        positions_T: torch.Tensor,
        attention: AttentionContext,
    ) -> State:
        """Return the next x and residual."""
        x_TD, residual_TD = add(self.input_layernorm, x_TD, residual_TD)
        x_TD = self.attend(x_TD, positions_T, attention)
        return x_TD, self.narrow(residual_TD, attention)


class SandwichBlock(Block):
    """h ← h + norm(Attention(norm(h))); h ← h + norm(MLP(norm(h))). Source: Gemma 2."""

    norm_names = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )
    input_layernorm: Norm
    post_attention_layernorm: Norm
    pre_feedforward_layernorm: Norm
    post_feedforward_layernorm: Norm

    def forward(
        self,
        x_TD: torch.Tensor,
        residual_TD: torch.Tensor | None,
        positions_T: torch.Tensor,
        attention: AttentionContext,
    ) -> State:
        """Return the next x and residual."""
        x_TD, residual_TD = add(self.input_layernorm, x_TD, residual_TD)
        x_TD = self.post_attention_layernorm(self.attend(x_TD, positions_T, attention))
        residual_TD = self.narrow(residual_TD, attention)
        x_TD, residual_TD = self.pre_feedforward_layernorm.add(x_TD, residual_TD)
        return self.post_feedforward_layernorm(self.scaled(self.mlp(x_TD))), residual_TD


class BranchNormBlock(Block):
    """h ← h + norm(Attention(h)); h ← h + norm(MLP(h)). Source: OLMo 2, arXiv:2501.00656."""

    norm_names = ("post_attention_layernorm", "post_feedforward_layernorm")
    post_attention_layernorm: Norm
    post_feedforward_layernorm: Norm

    def forward(
        self,
        x_TD: torch.Tensor,
        residual_TD: torch.Tensor | None,
        positions_T: torch.Tensor,
        attention: AttentionContext,
    ) -> State:
        """Return the next x and residual."""
        residual_TD = summed(x_TD, residual_TD)
        x_TD = self.post_attention_layernorm(self.attend(residual_TD, positions_T, attention))
        residual_TD = summed(x_TD, self.narrow(residual_TD, attention))
        return self.post_feedforward_layernorm(self.scaled(self.mlp(residual_TD))), residual_TD


class PostNormBlock(Block):
    """h ← norm(h + Attention(h)); h ← norm(h + MLP(h)). Source: Vaswani et al. 2017, 1706.03762."""

    norm_names = ("input_layernorm", "post_attention_layernorm")
    input_layernorm: Norm
    post_attention_layernorm: Norm

    def forward(
        self,
        x_TD: torch.Tensor,
        residual_TD: torch.Tensor | None,
        positions_T: torch.Tensor,
        attention: AttentionContext,
    ) -> State:
        """Return the hidden state, and None as residual."""
        hidden_TD = summed(x_TD, residual_TD)
        x_TD = self.attend(hidden_TD, positions_T, attention)
        hidden_TD, _ = self.input_layernorm.add(x_TD, self.narrow(hidden_TD, attention))
        x_TD = self.scaled(self.mlp(hidden_TD))
        hidden_TD, _ = self.post_attention_layernorm.add(x_TD, hidden_TD)
        return hidden_TD, None


class ParallelBlock(Block):
    """h ← h + Attention(n) + MLP(n) with n = norm(h). Source: GPT-J, PaLM (arXiv:2204.02311)."""

    norm_names = ("input_layernorm",)
    input_layernorm: Norm

    def forward(
        self,
        x_TD: torch.Tensor,
        residual_TD: torch.Tensor | None,
        positions_T: torch.Tensor,
        attention: AttentionContext,
    ) -> State:
        """Return the next x and residual."""
        normal_TD, residual_TD = add(self.input_layernorm, x_TD, residual_TD)
        x_TD = self.attend(normal_TD, positions_T, attention)
        x_TD = x_TD.add_(self.scaled(self.mlp(self.narrow(normal_TD, attention))))
        return x_TD, self.narrow(residual_TD, attention)


class TwoNormParallelBlock(Block):
    """h ← h + Attention(norm(h)) + MLP(norm(h)), with different norms. Source: GPT-NeoX."""

    norm_names = ("input_layernorm", "post_attention_layernorm")
    input_layernorm: Norm
    post_attention_layernorm: Norm

    def forward(
        self,
        x_TD: torch.Tensor,
        residual_TD: torch.Tensor | None,
        positions_T: torch.Tensor,
        attention: AttentionContext,
    ) -> State:
        """Return the next x and residual."""
        normal_TD, residual_TD = add(self.input_layernorm, x_TD, residual_TD)
        x_TD = self.attend(normal_TD, positions_T, attention)
        residual_TD = self.narrow(residual_TD, attention)
        branch_TD = self.mlp(self.post_attention_layernorm(residual_TD))
        return x_TD.add_(self.scaled(branch_TD)), residual_TD
