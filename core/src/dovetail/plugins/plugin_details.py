"""Collects all details of one plugin, either without importing it or from its loaded class.

Source files are read as text. If a file cannot be read, the details contain only its name.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.errors import PluginError, nearest
from dovetail.plugin_kinds import KINDS, get_kind
from dovetail.plugins.capabilities import declared_ids
from dovetail.plugins.contracts.adapters import ADAPTERS, check_api
from dovetail.plugins.contracts.api_range import parse_range
from dovetail.plugins.contracts.checks import contract_version, load_interface
from dovetail.plugins.metadata.description import Description
from dovetail.plugins.registry import PluginRegistry

_DECLARATIONS = ("CONTRACT", "CONTRACT_VERSION", "provides", "needs")


@dataclass(frozen=True, kw_only=True)
class OptionField:
    """One option of a plugin, from the source of its model. default: "" if it is required."""

    name: str
    type: str
    default: str = ""


@dataclass(frozen=True, kw_only=True)
class PluginDetails:
    """Details of a plugin that is not loaded.

    contract: "module:Class". core_version: the contract version of this core. fits: whether the
    range in the manifest includes it. denied: the rule that denies the plugin; "" for none. source:
    the file of its module. options: the fields of its options model. source and options are None if
    they cannot be determined without an import.
    """

    description: Description
    contract: str
    core_version: str
    fits: bool
    denied: str
    source: Path | None
    options: tuple[OptionField, ...] | None


@dataclass(frozen=True, kw_only=True)
class LoadedClass:
    """Details of a plugin's class that was loaded and meets its contract.

    notes: assumptions and side effects of its import. attributes: the attributes that the contract
    requires, by name.
    """

    cls: type[Any]
    contract_version: str
    provides: frozenset[str]
    needs: frozenset[str]
    attributes: dict[str, object]
    notes: tuple[str, ...]


def parse_plugin(text: str, registry: PluginRegistry) -> tuple[str, str]:
    """Return "kind:name" as (kind, reference). Raise PluginError for any other form."""
    kind, colon, reference = text.partition(":")
    if colon and reference and kind in KINDS:
        return kind, reference
    candidates = [
        (f"{kind}:{candidate.name}", candidate)
        for kind in KINDS
        for candidate in registry.candidates(kind)
    ]
    named = [
        full for full, candidate in candidates if text in (candidate.name, candidate.reference)
    ]
    if named:
        raise PluginError(
            f"{text!r} does not contain the kind of plugin. Write {' or '.join(named)}."
        )
    hint = nearest(kind, KINDS if colon else dict.fromkeys(c.name for _, c in candidates))
    raise PluginError(
        f"{text!r} does not name a plugin; write KIND:NAME, such as policy:fcfs.{hint}"
    )


def collect_plugin_details(registry: PluginRegistry, kind: str, reference: str) -> PluginDetails:
    """Return the details of a plugin without importing it, even if the user's rules deny it.

    Raises the errors of `PluginRegistry.describe`.
    """
    about = registry.describe(kind, reference)
    version = contract_version(kind)
    denied = registry.policy.denial_of(about)
    return PluginDetails(
        description=about,
        contract=get_kind(kind).contract,
        core_version=version,
        fits=_fits(about),
        denied=denied,
        source=find_source(about.target.partition(":")[0]),
        options=read_options(about.entry.options) if about.entry.options else (),
    )


def load_class(registry: PluginRegistry, kind: str, reference: str) -> LoadedClass:
    """Import and check a plugin, return its details. Raise the errors of `PluginRegistry.load`."""
    cls = registry.load(kind, reference)
    resolution = next(
        item
        for item in reversed(registry.resolutions)
        if item.kind == kind and _is(item.target, cls)
    )
    attributes = {
        name: getattr(cls, name) for name in _class_attributes(kind) if hasattr(cls, name)
    }
    return LoadedClass(
        cls=cls,
        contract_version=getattr(cls, "CONTRACT_VERSION", ""),
        provides=declared_ids(cls, "provides"),
        needs=declared_ids(cls, "needs"),
        attributes=attributes,
        notes=resolution.notes,
    )


def find_source(module: str) -> Path | None:
    """Return the Python file of a module without importing anything, or None if it is not found."""
    top, *rest = module.split(".")
    try:
        # Only for the top-level package, because finding the spec of a submodule imports parents.
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError, AttributeError):
        return None
    if spec is None:
        return None
    if not rest and spec.origin is not None:
        return Path(spec.origin)
    for folder in spec.submodule_search_locations or ():
        for path in (
            Path(folder, *rest[:-1], f"{rest[-1]}.py"),
            Path(folder, *rest, "__init__.py"),
        ):
            if os.path.isfile(path):
                return path
    return None


def read_options(target: str) -> tuple[OptionField, ...] | None:
    """Return the fields of "module:Model" from its source, or None if the model is not found."""
    module, _, name = target.partition(":")
    path = find_source(module)
    if path is None:
        return None
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return None
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return tuple(_fields(node))
    return None


def _fields(model: ast.ClassDef) -> Iterator[OptionField]:
    for node in model.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        hint = ast.unparse(node.annotation)
        if not hint.startswith("ClassVar") and not node.target.id.startswith(("_", "model_config")):
            default = "" if node.value is None else ast.unparse(node.value)
            yield OptionField(name=node.target.id, type=hint, default=default)


def _fits(about: Description) -> bool:
    api = about.entry.api
    if not api:
        return True
    parse_range(api)
    try:
        check_api(about.kind, api, str(about), ADAPTERS)
    except PluginError:
        return False
    return True


def _is(target: str, cls: type[Any]) -> bool:
    return target.rpartition(":")[2].split(".")[-1] == cls.__qualname__.split(".")[-1]


def _class_attributes(kind: str) -> list[str]:
    """Return the names of the class attributes in the contract."""
    interface = load_interface(get_kind(kind).contract)
    names: list[str] = []
    for base in inspect.getmro(interface):
        hints = inspect.get_annotations(base)
        names += [name for name, hint in hints.items() if not name.startswith("_")]
    return [name for name in dict.fromkeys(names) if name not in _DECLARATIONS]
