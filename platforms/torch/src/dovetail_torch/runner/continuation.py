"""A step that continues from the last one, each request a token further: columns are counted on.

Where the same requests decode side by side, a plan changes positions, lengths, slots and the tokens
just sampled, and nothing else. Gathering all that again costs several times what counting does, the
more so as the model's weights have pushed everything else out of the caches since. It ends at
a block's border, and when somebody joins, leaves or has more than one token. Only for devices that
compute in the host's memory, with attention that counts on too. Depends on neither model nor
sampler.
Legend: R runs, N steps that were continued, the first one included.
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
"""What a backend declares in its features if its builders are `AdvancingBuilder`s."""


class AdvancingBuilder(Protocol):
    """A metadata builder whose last metadata can be brought one token further."""

    def advance(self) -> None:
        """Change the metadata last built to the same runs, one token each, one position on.

        Called only where those positions lie in the blocks of the last ones, and outside torch's
        inference mode.
        """


class Continuable(Protocol):
    """What the runner asks about going on from the last step.

    batch: that step as it was gathered, or None.
    """

    batch: InputBatch | None

    def begin(self, batch: InputBatch) -> None:
        """Take a step that has been gathered, in which each run has one token and samples."""

    def follows(self, plan: SchedulerOutput) -> bool:
        """Return whether `plan` continues from the last step, whose tokens are there."""

    def advance(self) -> None:
        """Bring the last step's inputs one token further; only after `follows`."""

    def append(self, token_ids: array[int]) -> None:
        """Take the tokens that the current step has sampled, in the order of its runs."""

    def end(self) -> None:
        """Let the next step be gathered again."""


class NoContinuation:
    """Where every step is gathered again."""

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
    """The step that may be continued, and what was sampled in it and since.

    batch: that step as it was gathered, or None; its tensors move on, its host columns do not.
    """

    def __init__(
        self,
        rows: RequestRows,
        inputs: InputGatherer,
        builders: Sequence[AttentionMetadataBuilder],
    ) -> None:
        """builders: all of the runner's, each a `AdvancingBuilder`."""
        self.batch: InputBatch | None = None
        self._rows, self._inputs = rows, inputs
        self._builders = cast("Sequence[AdvancingBuilder]", builders)
        self._num_steps_left = 0
        self._sampled: list[array[int]] = []

    def begin(self, batch: InputBatch) -> None:
        """Take a step that has been gathered, in which each run has one token and samples."""
        self.batch = batch
        self._num_steps_left = self._inputs.num_steps_to_border(batch)

    def follows(self, plan: SchedulerOutput) -> bool:
        """Return whether `plan` continues from the last step, whose tokens are there."""
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
        """Count all columns on; the inputs are the tokens that were sampled last."""
        self._num_steps_left -= 1
        self._inputs.advance(self._sampled[-1])
        for builder in self._builders:
            builder.advance()

    def append(self, token_ids: array[int]) -> None:
        """Take the tokens that the current step has sampled, in the order of its runs."""
        self._sampled.append(token_ids)

    def end(self) -> None:
        """Write what was sampled to its rows; the next step is gathered again."""
        if self.batch is not None and self._sampled:
            sampled_NR = np.frombuffer(b"".join(self._sampled), np.int32)
            num_steps = len(self._sampled)
            positions_NR = self.batch.ends + np.arange(num_steps)[:, None]
            rows_NR = self.batch.rows[None].repeat(num_steps, 0)
            self._rows.append(
                rows_NR.ravel(), positions_NR.ravel(), torch.from_numpy(sampled_NR.copy())
            )
        self.batch, self._sampled = None, []
