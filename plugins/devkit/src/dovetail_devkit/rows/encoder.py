"""The encoder cache of a fake worker, with checks of how plans use it.

This module depends on plans and rows. No encoder runs: a number from `dovetail_devkit.rows.state`
represents an encoder output.
"""

from __future__ import annotations

from collections.abc import Mapping

from dovetail.interfaces.scheduler import SchedulerLimits
from dovetail.plan import SchedulerOutput
from dovetail_devkit.expectation import expect
from dovetail_devkit.rows.state import RowState


class FakeEncoder:
    """Tracks encoder outputs until a plan frees them. kept: number of tokens by content hash."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.kept: dict[bytes, int] = {}
        self._limits = limits

    def execute(self, plan: SchedulerOutput, rows: Mapping[int, RowState]) -> None:
        """Free and encode inputs as planned. Raise AssertionError if the plan violates a rule."""
        for content_hash in plan.encoder_frees:
            expect(content_hash in self.kept, "the plan frees an encoder input that is not encoded")
            del self.kept[content_hash]
        num_encoded = 0
        for run in plan.encoder:
            expect(
                run.row in rows, f"the plan encodes an input of row {run.row}, which has no request"
            )
            content = rows[run.row].request.encoder_inputs[run.index]
            expect(
                content.content_hash not in self.kept,
                "the plan encodes an input that is already encoded",
            )
            self.kept[content.content_hash] = content.num_tokens
            num_encoded += content.num_tokens
        budget, size = self._limits.max_num_encoder_tokens, self._limits.encoder_cache_tokens
        expect(
            num_encoded <= budget,
            f"the plan encodes {num_encoded} tokens, but max_num_encoder_tokens is {budget}",
        )
        held = sum(self.kept.values())
        expect(
            held <= size,
            f"the encoder cache has {held} tokens after the plan, but encoder_cache_tokens is "
            f"{size}",
        )

    def check(self, state: RowState, start: int, end: int) -> None:
        """Check that all encoder inputs at positions [start, end) of a row are encoded."""
        for content in state.request.encoder_inputs:
            first, last = content.position, content.position + content.num_tokens
            expect(
                last <= start or end <= first or content.content_hash in self.kept,
                f"{state.request.request_id} computes positions {start} to {end - 1}, but "
                f"the encoder input at {first} to {last - 1} is not encoded",
            )
