"""The first and the last layer of a language model: the token embedding and the LM head.

If several ranks share the model, each has a part of the vocabulary in both.
Dimensions: T tokens, S sampled positions, D hidden size, V vocabulary (width of the logits).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional

from dovetail.errors import ModelError
from dovetail.interfaces.model import ModelContext
from dovetail_torch.distributed.shard import shard_unevenly
from dovetail_torch.layers.linear import ParallelLinear, leaf_of


class VocabParallelEmbedding(nn.Module):
    """Rows of a table [V, D] by token id. The caller must reject ids outside 0 .. V - 1.

    borrows: see `ParallelLinear`. Because a step reads only a few rows of the table, a mapped file
    is as fast as a copy and needs less memory. is_mapped: whether the table is mapped.
    shard: the rows that this rank has; read by the weight loader.
    """

    borrows: ClassVar[frozenset[str]] = frozenset({"weight"})

    def __init__(self, context: ModelContext, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.ranks = context.ranks
        self.shard = shard_unevenly(
            vocab_size, self.ranks, f"the vocabulary of {vocab_size} tokens"
        )
        factory_kwargs = {"dtype": context.dtype, "device": context.device}
        weight_VD = torch.empty(self.shard.size, hidden_size, **factory_kwargs)
        self.weight = nn.Parameter(weight_VD, requires_grad=False)
        self.is_mapped = False
        self.ops = context.ops

    def borrow(self, part: int, weight: torch.Tensor) -> None:
        """Use a private, read-only mapping of the table. There is one part."""
        self.weight.data = weight
        self.is_mapped = True

    def forward(self, input_ids_T: torch.Tensor) -> torch.Tensor:
        """Return the embeddings, a new tensor [T, D]. Ids are int64."""
        if self.shard.is_whole:
            return self.ops.embedding(input_ids_T, self.weight)
        own_T = input_ids_T - self.shard.start
        is_foreign_T = (own_T < 0) | (own_T >= self.shard.size)
        x_TD = self.ops.embedding(own_T.masked_fill_(is_foreign_T, 0), self.weight)
        return self.ranks.all_reduce(x_TD.masked_fill_(is_foreign_T[:, None], 0))


class ParallelLMHead(ParallelLinear):
    """The last linear layer, [S, D] to logits [S, V]. May share the weight of an embedding.

    All ranks return the logits of the whole vocabulary, bitwise equal.

    A tied LM head is created and packed by the linear method like any other layer, but its `weight`
    is the embedding's parameter: `pack` may remove it from the LM head, but must not write to it.
    Raises ModelError if the LM head is tied and the linear method keeps more than an unpacked
    weight.
    """

    def __init__(
        self,
        context: ModelContext,
        name: str,
        vocab_size: int,
        hidden_size: int,
        *,
        tied_to: VocabParallelEmbedding | None = None,
        bias: bool = False,
    ) -> None:
        shard = shard_unevenly(vocab_size, context.ranks, f"the vocabulary of {vocab_size} tokens")
        super().__init__(context, name, hidden_size, {leaf_of(name): shard}, bias=bias)
        self.shard = shard
        self.maximum = -(-vocab_size // context.ranks.size)
        if tied_to is None:
            return
        kept = [key for key, _ in self.named_parameters(recurse=False)]
        if kept != ["weight", "bias"][: 1 + bias] or self.weight.shape != tied_to.weight.shape:
            raise ModelError(
                f"tie_word_embeddings is set, but the linear method "
                f"{type(self.linear_method).__name__} stores {name} as {', '.join(kept)}: "
                "choose another linear method, or a checkpoint with a separate lm_head"
            )
        self.weight = tied_to.weight

    def forward(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """Return the logits [S, V]. Their rows may be strided."""
        logits_SV = self.linear_method.apply(self, hidden_SD)
        if self.shard.is_whole:
            return logits_SV
        # An all-gather needs parts of equal size, so ranks with a smaller part pad it.
        missing = self.maximum - self.shard.size
        if missing:
            logits_SV = functional.pad(logits_SV, (0, missing))
        return self.ranks.all_gather(logits_SV)[:, : self.shard.whole]
