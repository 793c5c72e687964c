"""How workers and executors find the plugins of the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class PluginLookup(Protocol):
    """The part of the registry (`dovetail.plugins.PluginRegistry`) that contexts provide.

    The automatic selection (`dovetail.plugins.selection`) accepts the same object.
    """

    def load(self, kind: str, reference: str | type) -> type[Any]:
        """Return the class that `reference` names, imported and checked against its contract."""

    def options_of(self, kind: str, cls: type | None) -> Mapping[str, object]:
        """Return the validated user options of a plugin, or an empty mapping."""

    def resolution_of(self, kind: str, cls: type) -> Any:
        """Return the `Resolution` of a loaded class, or None."""

    @property
    def resolutions(self) -> Sequence[Any]:
        """The `Resolution` of each loaded or selected plugin."""
