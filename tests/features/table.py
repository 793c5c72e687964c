"""Reads docs/features.md: one row per feature, with its status and the tests that check it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docs" / "features.md"
STATUSES = ("works", "in part", "planned")
DIRECT = "direct"
"""An entry of the column "fakes": the tests name the implementation, so a fake cannot replace it.
"""


@dataclass(frozen=True, kw_only=True)
class Feature:
    """One row. tests: pytest node ids. fakes: plugin kinds. If the plugin of any of these kinds is
    replaced by its fake, all tests must fail."""

    id: str
    system: str
    status: str
    tests: tuple[str, ...]
    fakes: tuple[str, ...]


def read_features(text: str | None = None) -> list[Feature]:
    """Return the rows of the table in docs/features.md, or in `text`."""
    rows = []
    for line in (text or FILE.read_text("utf-8")).splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 5 and re.fullmatch(r"[A-Z]\d+", cells[0]):
            fakes = () if cells[4] in (DIRECT, "") else tuple(re.split(r",\s*", cells[4]))
            rows.append(
                Feature(
                    id=cells[0],
                    system=cells[1],
                    status=cells[2],
                    tests=tuple(re.findall(r"`([^`]+::[^`]+)`", cells[3])),
                    fakes=fakes,
                )
            )
    return rows
