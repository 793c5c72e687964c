"""The `dummy` weight loader: random weights without a checkpoint, for tests and measurements.

Values depend only on the seed and on the weight's checkpoint name: they do not depend on the order
of loading, fused layers, ranks, device or dtype (up to rounding).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import torch
from torch import nn

from dovetail.interfaces.weight_loader import WeightLoader, WeightLoaderContext
from dovetail_torch.progress_bar import progress_bar
from dovetail_torch.weights.assignment import Assignment, build_weight_table

STANDARD_DEVIATION = 0.02
PERIOD = 1_048_573
"""Maximum number of random numbers per weight; larger weights repeat them. It is a prime, so that
the rows of a matrix start at different positions of the sequence and no two rows are equal."""


class DummyLoader(WeightLoader):
    """Fills a model with small normal values, norms near 1, and integer weights with 0."""

    def __init__(self, context: WeightLoaderContext) -> None:
        """Store `context`, which contains the seed and the progress settings."""
        self.context = context

    def load(self, model: nn.Module) -> int:
        """Fill all parameters in place. Return 0, because no bytes are read."""
        assignments = build_weight_table(model).assignments
        with (
            progress_bar(
                "Loading weights", len(assignments), shown=self.context.progress
            ) as advance,
            torch.no_grad(),
        ):
            for assignment in assignments.values():
                _fill(assignment, self.context.seed)
                advance()
        return 0


def _fill(assignment: Assignment, seed: int) -> None:
    target = assignment.target
    if not target.is_floating_point():
        target.zero_()
        return
    digest = hashlib.blake2b(f"{seed}/{assignment.name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    num_drawn = min(math.prod(assignment.shape), PERIOD)
    values = torch.randn(num_drawn, generator=generator) * STANDARD_DEVIATION
    # In every supported architecture, a vector named "weight" is the scale of a norm.
    if target.ndim == 1 and assignment.name.endswith(".weight"):
        values += 1
    values = values.to(device=target.device, dtype=target.dtype)
    for flat, start in _spans(assignment):
        _repeat(values, start, flat)
    assignment.finish()


def _spans(assignment: Assignment) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield contiguous pieces of the target, each with its offset in the flattened weight."""
    target, shards = assignment.target, assignment.shards
    width = math.prod(assignment.shape[1:])
    first_row = shards[0].start if shards else 0
    if len(shards) < 2:
        yield target.view(-1), first_row * width
        return
    first_column = shards[1].start * math.prod(assignment.shape[2:])
    for number, row in enumerate(target, start=first_row):
        yield row.view(-1), number * width + first_column


def _repeat(values: torch.Tensor, start: int, flat: torch.Tensor) -> None:
    """Fill `flat` with a part of the repeated `values`, which begins at index `start`."""
    done = 0
    while done < len(flat):
        offset = (start + done) % len(values)
        count = min(len(values) - offset, len(flat) - done)
        flat[done : done + count].copy_(values[offset : offset + count])
        done += count
