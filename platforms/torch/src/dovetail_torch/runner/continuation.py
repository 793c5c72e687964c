"""A step that adds one token to each request of the last step: columns are incremented.

If the same requests decode again, only positions, lengths, slots and input tokens of the plan
change. Gathering all columns again takes several times as long as incrementing them, mainly because
the model's weights have evicted them from the processor caches. A continuation ends at
a block boundary, when a request starts, ends or is preempted, and when a request has more than one
token. Only for devices that compute in host memory, with attention that supports it. This module
does not depend on the model or the sampler.
Dimensions: R scheduled requests, N continued steps, including the first one.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol, cast

import numpy as np
import torch

from dovetail.interfaces import AttentionMetadataBuilder
from dovetail.plan import SchedulerOutput
from dovetail_torch.runner.input_batch import InputBatch, InputGatherer
from dovetail_torch.runner.request_rows import RequestRows

SUPPORTS_ADVANCE = "supports_advance"
"""Feature of backends whose builders are `AdvancingBuilder`s."""


class AdvancingBuilder(Protocol):
    """A metadata builder that can advance its last metadata by one token."""

    def advance(self) -> None:
        """Advance the last metadata by one position. Each request has one token.

        Called only if the new positions are in the blocks of the last tokens, and outside of
        torch's inference mode.
        """


class Continuable(Protocol):
    """The runner's interface for continuing the last step.

    batch: the last gathered step, or None.
    """

    batch: InputBatch | None

    def begin(self, batch: InputBatch) -> None:
        """Store a gathered step in which each request has one token and samples."""

    def follows(self, plan: SchedulerOutput) -> bool:
        """Return whether `plan` continues the last step. The tokens of that step must be known."""

    def advance(self) -> None:
        """Advance the last step's inputs by one token. Only after `follows`."""

    def append(self, token_ids: array[int]) -> None:
        """Store the tokens that the current step has sampled, in the order of its requests."""

    def end(self) -> None:
        """Require that the next step is gathered again."""


class NoContinuation:
    """An implementation that never continues a step: every step is gathered again."""

    batch: InputBatch | None = None

    def begin(self, batch: InputBatch) -> None:
        """Do nothing."""

    def follows(self, plan: SchedulerOutput) -> bool:
        """Return False."""
        return False

    def advance(self) -> None:
        """Do nothing."""

    def append(self, token_ids: array[int]) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing."""


class Continuation:
    """The step that may be continued, and the tokens that it and later steps have sampled.

    batch: the gathered step, or None; its tensors are advanced, its host columns are not.
    """

    def __init__(
        self,
        rows: RequestRows,
        inputs: InputGatherer,
        builders: Sequence[AttentionMetadataBuilder],
    ) -> None:
        """builders: all builders of the runner, each an `AdvancingBuilder`."""
        self.batch: InputBatch | None = None
        self._rows, self._inputs = rows, inputs
        self._builders = cast("Sequence[AdvancingBuilder]", builders)
        self._num_steps_left = 0
        self._sampled: list[array[int]] = []

    def begin(self, batch: InputBatch) -> None:
        """Store a gathered step in which each request has one token and samples."""
        self.batch = batch
        self._num_steps_left = self._inputs.num_steps_to_border(batch)

    def follows(self, plan: SchedulerOutput) -> bool:
        """Return whether `plan` continues the last step. The tokens of that step must be known."""
        if self.batch is None or not self._num_steps_left or not self._sampled:
            return False
        first = self.batch.plan
        return (
            plan.total_num_tokens == first.total_num_tokens
            and plan.rows == first.rows
            and plan.samples == first.samples
            and not (plan.joins or plan.leaves or any(grown.rows for grown in plan.blocks))
            and self._inputs.ends_at(plan.starts)
        )

    def advance(self) -> None:
        """Increment all columns. The inputs are the tokens that were sampled last."""
        self._num_steps_left -= 1
        self._inputs.advance(self._sampled[-1])
        for builder in self._builders:
            builder.advance()

    def append(self, token_ids: array[int]) -> None:
        """Store the tokens that the current step has sampled, in the order of its requests."""
        self._sampled.append(token_ids)

    def end(self) -> None:
        """Write the sampled tokens to their rows. The next step is gathered again."""
        if self.batch is not None and self._sampled:
            sampled_NR = np.frombuffer(b"".join(self._sampled), np.int32)
            num_steps = len(self._sampled)
            positions_NR = self.batch.ends + np.arange(num_steps)[:, None]
            rows_NR = self.batch.rows[None].repeat(num_steps, 0)
            self._rows.append(
                rows_NR.ravel(), positions_NR.ravel(), torch.from_numpy(sampled_NR.copy())
            )
        self.batch, self._sampled = None, []
