"""Instances: from a reference to an object, for kinds that are made of one small context.

Joins what belongs together at the start of such a plugin: loading its class, its validated options,
and making it with failures told as its own. Knows no kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dovetail.plugins.construction import construct
from dovetail.plugins.registry import PluginRegistry

Options = Mapping[str, object]


def make_instance(
    plugins: PluginRegistry,
    kind: str,
    reference: str | type,
    context: Callable[[Options], object],
) -> Any:
    """Load `reference` and return an instance of it.

    context: makes the constructor's argument of the plugin's own options.
    Raises PluginError if it cannot be loaded or made, ConfigError for options that are wrong.
    """
    cls = plugins.load(kind, reference)
    return construct(kind, cls, context(plugins.options_of(kind, cls)))


def plugin_name(plugins: PluginRegistry, kind: str, reference: str | type) -> str:
    """Return the name that a plugin goes by in options and messages."""
    return plugins.resolve(kind, reference).name
