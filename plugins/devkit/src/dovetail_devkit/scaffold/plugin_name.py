"""The names of a new plugin: of its package, its distribution and its class, from the one given.

A name that would get in the way of something installed is refused: two owners of one name would
make every use of it an error. Finds modules and distributions; imports none.
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
_FOLDERS_OF_A_PACKAGE = frozenset({"src", "tests"})
_MAX_LENGTH = 30
_NAME = re.compile(rf"[A-Za-z][A-Za-z0-9_]{{0,{_MAX_LENGTH - 1}}}")
_WORD_BORDER = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


@dataclass(frozen=True, kw_only=True)
class PluginName:
    """What a new plugin is called.

    name: as users write it, and its folder. package: what is imported. distribution: what is
    installed. stem: what its classes' names begin with.
    """

    name: str
    package: str
    distribution: str
    stem: str


def name_plugin(kind: str, name: str) -> PluginName:
    """Return the names that follow from `name`; raise PluginError for one that will not do."""
    if kind != COMMAND:
        get_kind(kind)
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise PluginError(
            f"{name!r} cannot be a plugin's name: it is a package's name, too. Write up to "
            f"{_MAX_LENGTH} letters, digits and underscores, a letter first, such as "
            "'shortest_first'."
        )
    package = _WORD_BORDER.sub("_", name).lower().strip("_")
    parts = [part for part in name.split("_") if part]
    made = PluginName(
        name=name,
        package=package,
        distribution=re.sub("_+", "-", package),
        stem="".join(part[0].upper() + part[1:] for part in parts),
    )
    _refuse_taken(kind, made)
    return made


def _refuse_taken(kind: str, made: PluginName) -> None:
    package = made.package
    if package.partition("_")[0] == _OURS:
        raise PluginError(
            f"{made.name!r} begins with {_OURS!r}, as the names of first-party packages do; "
            "choose a name of your own."
        )
    if package in sys.stdlib_module_names or package in _FOLDERS_OF_A_PACKAGE:
        raise PluginError(f"{package!r} is a module of Python or of every package; choose another.")
    try:
        owner = distribution(made.distribution)
    except PackageNotFoundError:
        owner = None
    if owner is not None:
        raise PluginError(
            f"The distribution {made.distribution!r} {owner.version} is installed; choose another "
            f"name, or run: pip uninstall {made.distribution}"
        )
    if importlib.util.find_spec(package) is not None:
        raise PluginError(f"A module {package!r} is there to import already; choose another.")
    candidates = () if kind == COMMAND else PluginRegistry().candidates(kind)
    for candidate in candidates:
        if candidate.name == made.name:
            raise PluginError(
                f"The {kind} {made.name!r} is {candidate.distribution}'s; choose another name."
            )
