"""`dovetail plugins list`: lists the installed plugins from their metadata.

This module loads no plugin.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

from cyclopts import Parameter

from dovetail.cli.plugins_table import print_table
from dovetail.plugin_kinds import KINDS
from dovetail.plugins.metadata.commands import KIND as COMMAND
from dovetail.plugins.metadata.commands import find_commands
from dovetail.plugins.metadata.discovery import Candidate
from dovetail.plugins.registry import PluginRegistry

_KIND_HELP = "Kind of plugins to list, such as scheduler."
_JSON_HELP = "Write a JSON array instead of a table."


def list_plugins(
    kind: Annotated[str | None, Parameter(help=_KIND_HELP)] = None,
    /,
    *,
    as_json: Annotated[bool, Parameter(name="--json", negative="", help=_JSON_HELP)] = False,
) -> int:
    """List the installed plugins.

    Only metadata and manifests are read. No plugin is imported, so a plugin that cannot be loaded
    is listed too.
    """
    registry = PluginRegistry()
    kinds = list(KINDS) if kind is None else [kind]
    candidates = [
        candidate for name in kinds if name != COMMAND for candidate in registry.candidates(name)
    ]
    if kind in (None, COMMAND):
        candidates += [command.plugin for command in find_commands(()).usable]
    registry.check_manifests()
    if as_json:
        records = [
            asdict(item) | {"verified": registry.entry_of(item).verified} for item in candidates
        ]
        print(json.dumps(records, indent=2))
    elif candidates:
        _show(candidates, [registry.entry_of(item).verified for item in candidates])
    else:
        print(f"No {kind or 'plugin'} is installed.")
    for sentence in registry.set_aside:
        print(f"dovetail: ignored: {sentence}", file=sys.stderr)
    for sentence in registry.warnings:
        print(f"dovetail: warning: {sentence}", file=sys.stderr)
    return 0


def _show(candidates: Sequence[Candidate], verified: Sequence[str]) -> None:
    """Print one line per plugin. Omit the column `verified` if it is empty for all plugins."""
    headings = ("kind", "name", "distribution", "target", "verified")
    rows = [
        (item.kind, item.name, f"{item.distribution} {item.version}", item.target, text)
        for item, text in zip(candidates, verified, strict=True)
    ]
    width = len(headings) if any(verified) else len(headings) - 1
    print_table(headings[:width], [row[:width] for row in rows])
