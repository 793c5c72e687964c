"""Records what ran before a decode step, because the time of a decode step depends on it."""

from __future__ import annotations

from enum import IntEnum

from dovetail.plan import SchedulerOutput


class After(IntEnum):
    """What ran in the step before a decode-only step. Other steps have the value SAME.

    SAME: the same requests. OTHERS: decodes of other requests. PROMPTS: prompts.
    """

    SAME = 0
    OTHERS = 1
    PROMPTS = 2


class PreviousStep:
    """The step that ran last. Before the first step, it counts as equal to any step."""

    def __init__(self) -> None:
        self._rows: bytes | None = None
        self._has_prompts = False

    def run(self, plan: SchedulerOutput) -> After:
        """Replace the last step by this one, and return what it follows."""
        has_prompts = plan.total_num_tokens > len(plan.rows)
        rows = plan.rows.tobytes()
        after = After.SAME if has_prompts else self.before_decodes(rows)
        self._rows, self._has_prompts = rows, has_prompts
        return after

    def run_decodes(self, rows: bytes) -> None:
        """Replace the last step by one in which these rows (int32) decode one token each."""
        self._rows, self._has_prompts = rows, False

    def before_decodes(self, rows: bytes) -> After:
        """Return what a step follows in which these rows (int32) decode one token each."""
        if self._has_prompts:
            return After.PROMPTS
        return After.SAME if self._rows in (None, rows) else After.OTHERS
