"""What workers and executors may ask of the engine's plugins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class PluginLookup(Protocol):
    """The engine's registry (`dovetail.plugins.PluginRegistry`), as far as contexts promise it.

    The functions of `dovetail.plugins.selection`, which choose a plugin that nobody requested, take
    the same object.
    """

    def load(self, kind: str, reference: str | type) -> type[Any]:
        """Return the class that `reference` names, imported and checked against its contract."""

    def options_of(self, kind: str, cls: type | None) -> Mapping[str, object]:
        """Return the user's options for a plugin, validated; empty if there are none."""

    def resolution_of(self, kind: str, cls: type) -> Any:
        """Return the `Resolution` of a class that was loaded, or None."""

    @property
    def resolutions(self) -> Sequence[Any]:
        """The `Resolution` of each plugin that was loaded or chosen."""
