"""Finds plugins in entry points, reads their manifests, loads, checks and selects them.

Three stages: `PluginRegistry.candidates` (metadata only), `.resolve` and `.describe` (one plugin
and its manifest, without an import), `.load` (import one plugin and check its contract). A plugin
is code with the permissions of the process that loads it. Plugins do not register themselves on
import, and there is no global registry: each engine has its own.
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
