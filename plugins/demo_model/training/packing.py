"""Packing: concatenates several conversations into rows of a fixed length.

Contract: `batch(step)` depends only on the seed and the step, so a run can be resumed and repeated.
This module does not depend on the network.

Shapes: B rows, L tokens of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

import torch
from conversations import draw_conversation
from tokenizer import ConversationEncoder
from torch import Tensor

# A batch is full when this number of conversations did not fit into any row.
_MAX_MISSES = 8


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The rows of one step, all int64 (B, L).

    `targets` is the next token at positions that contribute to the loss, and -1 elsewhere. `owners`
    is the index of the conversation within its row, and -1 for padding.
    """

    ids: Tensor
    targets: Tensor
    owners: Tensor


@dataclass(frozen=True, kw_only=True)
class Packer:
    """Draws conversations and packs them greedily into rows."""

    encoder: ConversationEncoder
    weights: Mapping[str, float]
    seed: int
    num_rows: int
    row_length: int

    def batch(self, step: int) -> Batch:
        """Return the batch of a step: `num_rows` rows of `row_length` tokens."""
        rng = Random(f"{self.seed}:{step}")
        shape = (self.num_rows, self.row_length)
        ids_BL = torch.zeros(shape, dtype=torch.int64)
        targets_BL = torch.full(shape, -1)
        owner_BL = torch.full(shape, -1)
        free = [self.row_length] * self.num_rows
        owners = [0] * self.num_rows
        misses = 0
        while misses < _MAX_MISSES:
            ids, mask = self.encoder.encode(draw_conversation(rng, self.weights))
            row = _best_row(free, len(ids))
            if row < 0:
                misses += 1
                continue
            start = self.row_length - free[row]
            end = start + len(ids)
            tokens = torch.tensor(ids)
            ids_BL[row, start:end] = tokens
            learned = torch.tensor(mask[1:], dtype=torch.bool)
            targets_BL[row, start : end - 1] = torch.where(learned, tokens[1:], -1)
            owner_BL[row, start:end] = owners[row]
            owners[row] += 1
            free[row] -= len(ids)
        return Batch(ids=ids_BL, targets=targets_BL, owners=owner_BL)


def _best_row(free: list[int], length: int) -> int:
    """Return the index of the fullest row that has space for `length` tokens, or -1."""
    fitting = [(room, row) for row, room in enumerate(free) if room >= length]
    return min(fitting)[1] if fitting else -1
