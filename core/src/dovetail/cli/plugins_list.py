"""`dovetail plugins list`: what is installed, from metadata; loads no plugin."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

from cyclopts import Parameter

from dovetail.plugins.discovery import Candidate
from dovetail.plugins.kinds import KINDS
from dovetail.plugins.registry import PluginRegistry

_KIND_HELP = "Only plugins of this kind, such as scheduler."
_JSON_HELP = "Write a JSON array instead of a table."


def list_plugins(
    kind: Annotated[str | None, Parameter(help=_KIND_HELP)] = None,
    /,
    *,
    as_json: Annotated[bool, Parameter(name="--json", negative="", help=_JSON_HELP)] = False,
) -> int:
    """List the installed plugins.

    Nothing is imported: whether a plugin loads is not known here.
    """
    registry = PluginRegistry()
    kinds = list(KINDS) if kind is None else [kind]
    found = [candidate for name in kinds for candidate in registry.candidates(name)]
    if as_json:
        print(json.dumps([asdict(candidate) for candidate in found], indent=2))
    elif found:
        _print_table(found)
    else:
        print(f"No {kind or 'plugin'} is installed.")
    for sentence in registry.set_aside:
        print(f"dovetail: set aside: {sentence}", file=sys.stderr)
    return 0


def _print_table(candidates: Sequence[Candidate]) -> None:
    """Print one line a plugin; in a pipe as wide as needed, so that no line is broken."""
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("kind", "name", "distribution", "target"):
        table.add_column(heading, overflow="fold")
    for candidate in candidates:
        whose = f"{candidate.distribution} {candidate.version}"
        cells = (candidate.kind, candidate.name, whose, candidate.target)
        table.add_row(*(Text(cell) for cell in cells))
    console = Console()
    if not console.is_terminal:
        unbounded = console.options.update(max_width=100_000)
        console.width = Measurement.get(console, unbounded, table).maximum
    console.print(table)
