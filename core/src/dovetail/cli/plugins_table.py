"""Prints tables and JSON for the `plugins` commands.

This module imports rich only when a table is printed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

STYLES: Mapping[str, str] = {
    "selected": "bold green",
    "ok": "green",
    "usable": "cyan",
    "note": "cyan",
    "rejected": "yellow",
    "warning": "yellow",
    "failed": "bold red",
    "broken": "bold red",
    "not tried": "dim",
}
"""Maps a word to the style of the table cells that contain only this word."""


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "") -> None:
    """Print a table. In a pipe it is as wide as needed, so that no line is broken."""
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.show_header = any(headings)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*map(_cell, row, headings))
    console = Console()
    if not console.is_terminal:
        unbounded = console.options.update(max_width=100_000)
        # A column without text is one character wide, which the measurement does not count.
        width = Measurement.get(console, unbounded, table).maximum + len(headings)
        console.width = max(1, width)
    if title:
        console.print(Text(title, style="bold"), soft_wrap=True)
    console.print(table)


def print_line(text: str, *, style: str = "") -> None:
    """Print text without markup. Wrap it between words only on a terminal."""
    from rich.text import Text

    console = _console()
    console.print(Text(text, style=style), soft_wrap=not console.is_terminal)


def print_json(value: object) -> None:
    """Print nested dataclasses as JSON. Sets are sorted, and classes are written as names.

    Lone surrogates, which represent the bytes of a path that is not UTF-8, are escaped.
    """
    text = json.dumps(_plain(value), indent=2, ensure_ascii=False)
    print(text.encode("utf-8", "backslashreplace").decode("utf-8"))


def _cell(text: str, heading: str) -> Text:
    """Return a table cell. Words are styled only in columns without a heading."""
    from rich.text import Text

    return Text(text, style="" if heading else STYLES.get(text, ""))


def _console() -> Console:
    from rich.console import Console

    return Console()


def _plain(value: object) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {name: _plain(item) for name, item in _shallow(value).items()}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(map(_plain, value))
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, type):
        return f"{value.__module__}:{value.__qualname__}"
    return str(value) if isinstance(value, Path) else value


def _shallow(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}
