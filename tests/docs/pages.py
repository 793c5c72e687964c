"""The plugin author's guide as data: its pages, and the blocks of code in them.

The code blocks of a page have a fixed order: the first Python block is the plugin, the second its
tests; the first TOML block declares it, a second TOML block is its manifest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "plugins"
OTHER_PAGES = {"README", "commands", "layers", "model_family", "test_kernels"}
"""Pages that do not describe one plugin kind."""

_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Page:
    """One page of the guide. kind: the page's file name, usually the plugin kind."""

    path: Path

    @property
    def kind(self) -> str:
        return self.path.stem

    @property
    def text(self) -> str:
        return self.path.read_text("utf-8")

    def blocks(self, language: str) -> list[str]:
        """Return the fenced blocks of a language in page order."""
        return [body for actual, body in _FENCE.findall(self.text) if actual == language]


def kind_pages() -> list[Page]:
    return [Page(path=p) for p in sorted(GUIDE.glob("*.md")) if p.stem not in OTHER_PAGES]


def page(name: str) -> Page:
    return Page(path=GUIDE / f"{name}.md")
