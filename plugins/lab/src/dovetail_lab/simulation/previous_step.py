"""Records the previous step, because the time of a decode step depends on it."""

from __future__ import annotations

from enum import IntEnum

from dovetail.plan import SchedulerOutput


class After(IntEnum):
    """What ran in the step before a decode-only step. Steps with prefills always have SAME.

    SAME: decodes of the same requests. OTHERS: decodes of other requests. PROMPTS: prefills.
    """

    SAME = 0
    OTHERS = 1
    PROMPTS = 2


class PreviousStep:
    """The previous step. Before the first step, `SAME` is returned for any step."""

    def __init__(self) -> None:
        self._rows: bytes | None = None
        self._has_prompts = False

    def run(self, plan: SchedulerOutput) -> After:
        """Record a step. Return what the previous step ran."""
        has_prompts = plan.total_num_tokens > len(plan.rows)
        rows = plan.rows.tobytes()
        after = After.SAME if has_prompts else self.before_decodes(rows)
        self._rows, self._has_prompts = rows, has_prompts
        return after

    def run_decodes(self, rows: bytes) -> None:
        """Record a step in which these batch slots (int32) decode one token each."""
        self._rows, self._has_prompts = rows, False

    def before_decodes(self, rows: bytes) -> After:
        """Return what the previous step ran, if these batch slots (int32) now decode a token."""
        if self._has_prompts:
            return After.PROMPTS
        return After.SAME if self._rows in (None, rows) else After.OTHERS
