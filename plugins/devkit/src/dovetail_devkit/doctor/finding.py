"""Findings: the results of the doctor's checks."""

from __future__ import annotations

from dataclasses import dataclass

OK = "ok"
NOTE = "note"
"""The finding is only information; nothing is wrong."""
WARNING = "warning"
"""The subject works, but not as well or as safely as it should."""
BROKEN = "broken"
"""The subject does not work."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check.

    area: "machine", "environment" or "plugins". subject: the checked object, such as a plugin.
    verdict: one of this module's constants. remedy: what to do; "" if nothing is to be done.
    """

    area: str
    subject: str
    verdict: str
    text: str
    remedy: str = ""
