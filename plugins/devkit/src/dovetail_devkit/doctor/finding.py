"""Findings: what the doctor says of one thing."""

from __future__ import annotations

from dataclasses import dataclass

OK = "ok"
NOTE = "note"
"""Nothing is wrong, but it is good to know."""
WARNING = "warning"
"""It works, but not as well or not as safely as it should."""
BROKEN = "broken"
"""It does not work."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What is to be said of one thing.

    area: "machine", "environment" or "plugins". subject: the thing. verdict: one of this module's
    words. remedy: what to do; "" where there is nothing to do.
    """

    area: str
    subject: str
    verdict: str
    text: str
    remedy: str = ""
