"""A fake model with one attention layer, in torch.

This module imports torch, so import this module only to test models. Dimensions: T tokens, S
sampled positions, D hidden size, V vocabulary, H heads.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from dovetail.errors import ModelError
from dovetail.interfaces.model import AttentionContext, ModelContext

NUM_HEADS = 2
MAX_POSITION_SCALE = 0.3


class FakeModel(nn.Module):  # type: ignore[misc]  # the core's type checker does not see torch
    """A model with an embedding, attention, a norm and an LM head.

    A sine of the position is added to the input of attention. Reads vocab_size and hidden_size of
    config.json.
    """

    CONTRACT: ClassVar[str] = "model"
    CONTRACT_VERSION: ClassVar[str] = "0.10"
    architectures: ClassVar[tuple[str, ...]] = ("FakeModel",)

    def __init__(self, context: ModelContext) -> None:
        super().__init__()
        vocab_size = _read_count(context, "vocab_size")
        hidden_size = _read_count(context, "hidden_size")
        self._ops = context.ops
        shapes = {
            "embed": (vocab_size, hidden_size),
            "qkv": (3 * hidden_size, hidden_size),
            "out": (hidden_size, hidden_size),
            "norm": (hidden_size,),
            "head": (vocab_size, hidden_size),
        }
        for name, shape in shapes.items():
            values = torch.empty(shape, dtype=context.dtype, device=context.device)
            self.register_parameter(name, nn.Parameter(values, requires_grad=False))

    def forward(
        self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, attention: AttentionContext
    ) -> torch.Tensor:
        """Return the hidden states after the last norm, [T, D]. ids and positions are int64."""
        x_TD = self.embed[input_ids_T]
        angle_T1 = (positions_T[:, None] * MAX_POSITION_SCALE).to(x_TD.dtype)
        q_TD, k_TD, v_TD = (torch.sin(angle_T1) + x_TD).matmul(self.qkv.T).chunk(3, dim=-1)
        heads = (-1, NUM_HEADS, q_TD.shape[-1] // NUM_HEADS)
        attended_THD = attention.attend(0, q_TD.view(heads), k_TD.view(heads), v_TD.view(heads))
        x_TD, attended_TD = attention.narrow(x_TD), attention.narrow(attended_THD.flatten(-2))
        x_TD = x_TD + attended_TD.matmul(self.out.T)
        return self._ops.rms_norm(x_TD, self.norm, 1e-6)

    def compute_logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """Return the logits, [S, V]."""
        return hidden_SD.matmul(self.head.T)


def _read_count(context: ModelContext, name: str) -> int:
    value = context.hf_config.get(name)
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json has {name}={value!r}; expected a positive integer.")
    return value


class PositionalModel(FakeModel):
    """A fake model without attention. Logits depend only on the last token and its position.

    It needs no KV cache, and runs under workers with any attention layers.
    """

    architectures: ClassVar[tuple[str, ...]] = ("PositionalModel",)

    def forward(
        self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, attention: AttentionContext
    ) -> torch.Tensor:
        """Return the hidden states after the last norm, [T, D]. ids and positions are int64."""
        x_TD = self.embed[input_ids_T]
        angle_T1 = (positions_T[:, None] * MAX_POSITION_SCALE).to(x_TD.dtype)
        x_TD = (torch.sin(angle_T1) + x_TD).matmul(self.out.T)
        return self._ops.rms_norm(x_TD, self.norm, 1e-6)
