"""Findings: the results of the doctor's checks."""

from __future__ import annotations

from dataclasses import dataclass

OK = "ok"
NOTE = "note"
"""Verdict for information only: nothing is wrong."""
WARNING = "warning"
"""Verdict for a subject that works, but is slower or less safe than it should be."""
BROKEN = "broken"
"""Verdict for a subject that does not work."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check.

    area: "machine", "environment" or "plugins". subject: the checked object, such as a plugin.
    verdict: one of this module's constants. remedy: what the user should do; "" for nothing.
    """

    area: str
    subject: str
    verdict: str
    text: str
    remedy: str = ""
