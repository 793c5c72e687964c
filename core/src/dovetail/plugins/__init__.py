"""Plugins: discovered from entry points, described by manifests, loaded, checked, selected.

Three stages: `PluginRegistry.candidates` (metadata only), `.resolve` and `.describe` (one of them
and its manifest, still nothing imported), `.load` (import what was chosen and check what it
promised). A plugin is code with the rights of the process that loads it. Nothing here registers
itself on import, and there is no global registry: an engine is given one.

The names below are imported when they are first used, since the table of kinds is read early.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from dovetail.plugin_kinds import KINDS, Kind, get_kind

if TYPE_CHECKING:
    from dovetail.plugins.contracts.checks import check_contract
    from dovetail.plugins.metadata.description import Description
    from dovetail.plugins.metadata.discovery import Candidate, Discovery, discover
    from dovetail.plugins.registry import PluginRegistry
    from dovetail.plugins.resolving.plugin_policy import PluginPolicy
    from dovetail.plugins.resolving.reference import (
        FileReference,
        NamedReference,
        QualifiedReference,
        Reference,
        parse_reference,
    )
    from dovetail.plugins.resolving.resolution import Resolution, compare_resolutions

_HOMES = {
    "Candidate": "metadata.discovery",
    "Description": "metadata.description",
    "Discovery": "metadata.discovery",
    "FileReference": "resolving.reference",
    "NamedReference": "resolving.reference",
    "PluginPolicy": "resolving.plugin_policy",
    "PluginRegistry": "registry",
    "QualifiedReference": "resolving.reference",
    "Reference": "resolving.reference",
    "Resolution": "resolving.resolution",
    "check_contract": "contracts.checks",
    "compare_resolutions": "resolving.resolution",
    "discover": "metadata.discovery",
    "parse_reference": "resolving.reference",
}

__all__ = [
    "KINDS",
    "Candidate",
    "Description",
    "Discovery",
    "FileReference",
    "Kind",
    "NamedReference",
    "PluginPolicy",
    "PluginRegistry",
    "QualifiedReference",
    "Reference",
    "Resolution",
    "check_contract",
    "compare_resolutions",
    "discover",
    "get_kind",
    "parse_reference",
]


def __getattr__(name: str) -> object:
    """Import a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
