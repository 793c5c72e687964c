"""Plugins: discovered from entry points, described by manifests, loaded, checked, selected.

Three stages: `PluginRegistry.candidates` (metadata only), `.resolve` and `.describe` (one of them
and its manifest, still nothing imported), `.load` (import what was chosen and check what it
promised). A plugin is code with the rights of the process that loads it. Nothing here registers
itself on import, and there is no global registry: an engine is given one.
"""

from dovetail.plugin_kinds import KINDS, Kind, get_kind
from dovetail.plugins.contracts.checks import check_contract
from dovetail.plugins.metadata.discovery import Candidate
from dovetail.plugins.registry import PluginRegistry
from dovetail.plugins.resolving.plugin_policy import PluginPolicy
from dovetail.plugins.resolving.resolution import Resolution, compare_resolutions

__all__ = [
    "KINDS",
    "Candidate",
    "Kind",
    "PluginPolicy",
    "PluginRegistry",
    "Resolution",
    "check_contract",
    "compare_resolutions",
    "get_kind",
]
