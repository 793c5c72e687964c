"""Finds plugins in entry points, reads their manifests, loads, checks and selects them.

Three stages: `PluginRegistry.candidates` (metadata only), `.resolve` and `.describe` (one plugin
and its manifest, without an import), `.load` (import one plugin and check its contract). A plugin
is code with the permissions of the process that loads it. Plugins do not register themselves on
import, and there is no global registry: each engine has its own.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dovetail.plugin_kinds import KINDS, Kind, get_kind

if TYPE_CHECKING:
    from dovetail.plugins.contracts.checks import check_contract
    from dovetail.plugins.metadata.discovery import Candidate
    from dovetail.plugins.registry import PluginRegistry
    from dovetail.plugins.resolving.plugin_policy import PluginPolicy
    from dovetail.plugins.resolving.resolution import Resolution, compare_resolutions

# The command line needs the metadata of plugins only. The other modules are slow to import.
_HOMES = {
    "Candidate": "dovetail.plugins.metadata.discovery",
    "PluginPolicy": "dovetail.plugins.resolving.plugin_policy",
    "PluginRegistry": "dovetail.plugins.registry",
    "Resolution": "dovetail.plugins.resolving.resolution",
    "check_contract": "dovetail.plugins.contracts.checks",
    "compare_resolutions": "dovetail.plugins.resolving.resolution",
}

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


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
