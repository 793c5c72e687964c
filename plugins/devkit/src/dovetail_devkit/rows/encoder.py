"""What a made-up worker keeps of its encoders: which content is encoded, and the laws of that.

Knows plans and rows. Nothing is computed here: what an encoder makes of content is a number that
`dovetail_devkit.rows.state` knows.
"""

from __future__ import annotations

from collections.abc import Mapping

from dovetail.interfaces.scheduler import SchedulerLimits
from dovetail.plan import SchedulerOutput
from dovetail_devkit.expectation import expect
from dovetail_devkit.rows.state import RowState


class FakeEncoder:
    """Encodes content of rows and keeps it until it is freed. kept: content hash to tokens."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.kept: dict[bytes, int] = {}
        self._limits = limits

    def execute(self, plan: SchedulerOutput, rows: Mapping[int, RowState]) -> None:
        """Free and encode what the plan says; raise AssertionError if it breaks a law."""
        for content_hash in plan.encoder_frees:
            expect(content_hash in self.kept, "content is freed that is not there")
            del self.kept[content_hash]
        num_encoded = 0
        for run in plan.encoder:
            expect(run.row in rows, f"row {run.row} is encoded for, but nobody has it")
            content = rows[run.row].request.encoder_inputs[run.index]
            expect(
                content.content_hash not in self.kept, "content is encoded that is there already"
            )
            self.kept[content.content_hash] = content.num_tokens
            num_encoded += content.num_tokens
        budget, size = self._limits.max_num_encoder_tokens, self._limits.encoder_cache_tokens
        expect(num_encoded <= budget, f"{num_encoded} tokens are encoded; the budget is {budget}")
        held = sum(self.kept.values())
        expect(held <= size, f"{held} encoded tokens are kept; the cache holds {size}")

    def check(self, state: RowState, start: int, end: int) -> None:
        """Hold that what stands at positions [start, end) of a row is there, if encoded at all."""
        for content in state.request.encoder_inputs:
            first, last = content.position, content.position + content.num_tokens
            expect(
                last <= start or end <= first or content.content_hash in self.kept,
                f"{state.request.request_id} runs positions {start} to {end - 1}; the content that "
                f"stands at {first} to {last - 1} is not encoded",
            )
