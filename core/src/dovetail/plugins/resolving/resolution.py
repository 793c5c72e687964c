"""Resolutions: the plugins to which a user's references refer, as plain data.

Each process sends the resolutions of its loaded plugins, and the engine compares them between
ranks. This module does not depend on how references are resolved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dovetail.interfaces.frozen_mapping import FrozenDict
from dovetail.plugins.metadata.discovery import Candidate


@dataclass(frozen=True, kw_only=True)
class Resolution(Candidate):
    """The plugin to which a reference refers.

    name: the plugin's name, or the class path if the user gave one. target: "module:Class" or
    "/file.py:Class". notes: sentences about assumptions and about side effects of the import.
    options: the plugin's validated options. roles: the processes that load the plugin.
    """

    notes: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=FrozenDict, hash=False)
    roles: tuple[str, ...] = ()


def compare_resolutions(per_rank: Sequence[Sequence[Resolution]]) -> list[str]:
    """Return a sentence for each difference between the plugins that the ranks have loaded.

    per_rank: the resolutions of rank 0, rank 1, … Target, distribution, version and options are
    compared; notes and the order of loading are not. Only plugins with the role "worker" or without
    roles are compared.
    """
    tables = [_table(resolutions) for resolutions in per_rank]
    keys = dict.fromkeys(key for table in tables for key in table)
    return [problem for key in keys if (problem := _difference(key, tables))]


def _table(resolutions: Sequence[Resolution]) -> dict[tuple[str, str], Resolution]:
    in_worker = (
        resolution
        for resolution in resolutions
        if not resolution.roles or "worker" in resolution.roles
    )
    return {(item.kind, item.name): item for item in in_worker}


def _difference(
    key: tuple[str, str], tables: Sequence[Mapping[tuple[str, str], Resolution]]
) -> str:
    ranks_by_state: dict[str, list[int]] = {}
    for rank, table in enumerate(tables):
        ranks_by_state.setdefault(_state(table.get(key)), []).append(rank)
    if len(ranks_by_state) == 1:
        return ""
    listed = "; ".join(
        f"{state} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        for state, ranks in ranks_by_state.items()
    )
    return (
        f"The {key[0]} {key[1]!r} is not the same on all ranks: {listed}. "
        "Install the same version on every machine."
    )


def _state(resolution: Resolution | None) -> str:
    if resolution is None:
        return "not loaded"
    owner = f"{resolution.distribution} {resolution.version}".strip() or "no distribution"
    options = f" with {dict(resolution.options)}" if resolution.options else ""
    return f"{resolution.target} ({owner}){options}"
