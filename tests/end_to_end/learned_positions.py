"""Third-party models with a learned position table and no attention."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from dovetail.interfaces import AttentionContext, ModelContext
from dovetail_torch import layers


class Undeclared(nn.Module):
    """Adds a learned position embedding. The table has `n_positions` rows, as in config.json."""

    architectures: ClassVar[tuple[str, ...]] = ("Undeclared",)

    def __init__(self, context: ModelContext) -> None:
        super().__init__()
        config = context.hf_config
        size = config["hidden_size"]
        self.num_positions = config.get("n_positions") or config["block_length"]
        self.wte = layers.VocabParallelEmbedding(context, config["vocab_size"], size)
        self.wpe = nn.Embedding(self.num_positions, size, dtype=context.dtype)
        self.wpe.requires_grad_(False)
        self.lm_head = layers.ParallelLMHead(context, "lm_head", config["vocab_size"], size)

    def forward(
        self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, attention: AttentionContext
    ) -> torch.Tensor:
        """Return the hidden states, [T, D]."""
        return self.wte(input_ids_T) + self.wpe(positions_T)

    def compute_logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """Return the logits, [S, V]."""
        return self.lm_head(hidden_SD)


class Declared(Undeclared):
    """The same model, which also declares the number of rows of its table."""

    @property
    def max_positions(self) -> int:
        """Return the number of rows of the table."""
        return self.num_positions
