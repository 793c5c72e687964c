"""Derives the names of a new package, distribution and class from the name of a plugin.

A name is rejected if an installed module, distribution or plugin of the same kind has it, because
every use of an ambiguous name is an error. Modules are only looked up, not imported.
"""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution

from dovetail.errors import PluginError
from dovetail.plugin_kinds import get_kind
from dovetail.plugins.registry import PluginRegistry
from dovetail_devkit.scaffold.blueprint import COMMAND

_OURS = "dovetail"
_PACKAGE_FOLDERS = frozenset({"src", "tests"})
_MAX_LENGTH = 30
_NAME = re.compile(rf"[A-Za-z][A-Za-z0-9_]{{0,{_MAX_LENGTH - 1}}}")
_WORD_BORDER = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


@dataclass(frozen=True, kw_only=True)
class PluginName:
    """The names of a new plugin.

    name: the plugin's name, which is also the name of the directory. package: the name to import.
    distribution: the name to install. stem: the beginning of the class names.
    """

    name: str
    package: str
    distribution: str
    stem: str


def name_plugin(kind: str, name: str) -> PluginName:
    """Return the names derived from `name`. Raise PluginError if it is invalid or in use."""
    if kind != COMMAND:
        get_kind(kind)
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise PluginError(
            f"{name!r} is not a valid plugin name. Write a name of up to {_MAX_LENGTH} letters, "
            "digits and underscores that starts with a letter, such as 'shortest_first'."
        )
    package = _WORD_BORDER.sub("_", name).lower().strip("_")
    parts = [part for part in name.split("_") if part]
    plugin_name = PluginName(
        name=name,
        package=package,
        distribution=re.sub("_+", "-", package),
        stem="".join(part[0].upper() + part[1:] for part in parts),
    )
    _check_free(kind, plugin_name)
    return plugin_name


def _check_free(kind: str, plugin_name: PluginName) -> None:
    package = plugin_name.package
    if package.partition("_")[0] == _OURS:
        raise PluginError(
            f"The plugin name {plugin_name.name!r} begins with {_OURS!r}, which is reserved for "
            "first-party packages. Choose another name."
        )
    if package in sys.stdlib_module_names or package in _PACKAGE_FOLDERS:
        raise PluginError(
            f"The package name {package!r} is reserved by Python, or is the name of a directory "
            "in every package. "
            f"Choose another name."
        )
    try:
        owner = distribution(plugin_name.distribution)
    except PackageNotFoundError:
        owner = None
    if owner is not None:
        raise PluginError(
            f"The distribution {plugin_name.distribution!r} {owner.version} is already installed. "
            f"Choose another name, or run: pip uninstall {plugin_name.distribution}"
        )
    if importlib.util.find_spec(package) is not None:
        raise PluginError(f"A module named {package!r} already exists. Choose another name.")
    candidates = () if kind == COMMAND else PluginRegistry().candidates(kind)
    for candidate in candidates:
        if candidate.name == plugin_name.name:
            raise PluginError(
                f"The {kind} plugin {plugin_name.name!r} of {candidate.distribution} is already "
                "installed. Choose another name."
            )
