"""Lines of documents have at most 120 columns, except for tables and recorded output."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_COLUMNS = 120
RECORDED = ("docs/plugins/commands.md",)
"""Pages with code blocks that are recorded output."""


def pages() -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.splitlines() if (ROOT / name).is_file()]


def wide_lines(text: str, *, skip_code: bool = False) -> list[int]:
    """Return the line numbers of lines that are too long and not in a table."""
    collected, in_code = [], False
    for number, line in enumerate(text.splitlines(), 1):
        in_code ^= line.lstrip().startswith("```")
        if len(line) > MAX_COLUMNS and not line.startswith("|") and not (in_code and skip_code):
            collected.append(number)
    return collected


@pytest.mark.costly
@pytest.mark.parametrize("name", pages())
def test_lines_of_documents_have_at_most_120_columns(name):
    text = (ROOT / name).read_text("utf-8")
    wide = wide_lines(text, skip_code=name in RECORDED)
    assert not wide, f"{name}: lines {wide[:5]} have more than {MAX_COLUMNS} columns"


def test_only_tables_may_have_long_lines():
    long = "x" * (MAX_COLUMNS + 1)
    assert wide_lines(f"short\n{long}\n| {long} |\n```\n{long}\n```\n") == [2, 5]
    assert wide_lines(f"{long}\n```\n{long}\n```\n", skip_code=True) == [1]
