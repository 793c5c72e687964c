"""Plugins: discovered from entry points, resolved by name, loaded on demand, held to a contract.

Three stages: `PluginRegistry.candidates` (metadata only), `.resolve` (one of them, still nothing
imported), `.load` (import what was chosen and check its contract). A plugin is code with the rights
of the process that loads it. Nothing here registers itself on import, and there is no global
registry: an engine is given one.
"""

from dovetail.plugins.contract import check_contract
from dovetail.plugins.discovery import Candidate, Discovery, discover
from dovetail.plugins.kinds import KINDS, Kind, get_kind
from dovetail.plugins.reference import (
    FileReference,
    NamedReference,
    QualifiedReference,
    Reference,
    parse_reference,
)
from dovetail.plugins.registry import PluginRegistry, Resolution

__all__ = [
    "KINDS",
    "Candidate",
    "Discovery",
    "FileReference",
    "Kind",
    "NamedReference",
    "PluginRegistry",
    "QualifiedReference",
    "Reference",
    "Resolution",
    "check_contract",
    "discover",
    "get_kind",
    "parse_reference",
]
