"""Plugins: discovered from entry points, described by manifests, loaded and held to contracts.

Three stages: `PluginRegistry.candidates` (metadata only), `.resolve` and `.describe` (one of them
and its manifest, still nothing imported), `.load` (import what was chosen and check what it
promised). A plugin is code with the rights of the process that loads it. Nothing here registers
itself on import, and there is no global registry: an engine is given one.
"""

from dovetail.plugins.contract import check_contract
from dovetail.plugins.description import Description
from dovetail.plugins.discovery import Candidate, Discovery, discover
from dovetail.plugins.kinds import KINDS, Kind, get_kind
from dovetail.plugins.plugin_policy import PluginPolicy
from dovetail.plugins.reference import (
    FileReference,
    NamedReference,
    QualifiedReference,
    Reference,
    parse_reference,
)
from dovetail.plugins.registry import PluginRegistry
from dovetail.plugins.resolution import Resolution, compare_resolutions

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
