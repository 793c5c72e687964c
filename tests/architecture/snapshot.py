"""The signatures of the contracts as JSON data, and the rule for changing them.

`python tests/architecture/snapshot.py --write` writes contracts.json. It writes nothing if a
contract differs from the file and its version does not: increase CONTRACT_VERSION first, so that
plugins for the old contract can be recognized.

A contract is a module of `dovetail.interfaces`. Modules without a version (the cache description,
plans, rows, results, requests) belong to the contracts that use them. A configuration section
belongs to every contract with a signature that names it or a type that contains it.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import json
import pkgutil
import re
import sys
import typing
from pathlib import Path
from types import ModuleType
from typing import Any

FILE = Path(__file__).with_name("contracts.json")
CORE = Path(__file__).resolve().parents[2] / "core/src"

OPTIONAL = "optional "
"""Prefix in the signature of a method that plugins may omit."""

# Maps a module without a CONTRACT_VERSION to the contracts whose version must be raised with it.
SHARED = {
    "dovetail.interfaces.plugin_lookup": ("executor", "worker"),
    "dovetail.interfaces.kv_cache": ("attention", "scheduler", "worker"),
    "dovetail.interfaces.op_arguments": ("ops",),
    "dovetail.interfaces.sampling_support": ("worker",),
    "dovetail.plan": ("scheduler", "worker"),
    "dovetail.request": ("scheduler",),
    "dovetail.result": ("scheduler", "worker"),
    "dovetail.rows": ("scheduler",),
}

# Modules with configuration sections, which contracts include in their contexts.
SECTIONS = tuple(
    f"dovetail.interfaces.{name}"
    for name in ("config_fields", "engine_config", "frozen_mapping", "requested_config")
)


def take_snapshot() -> dict[str, Any]:
    """Return {"versions": versions by contract, "modules": classes by module}."""
    import dovetail.interfaces as package

    names = [f"{package.__name__}.{info.name}" for info in pkgutil.iter_modules(package.__path__)]
    modules = [importlib.import_module(name) for name in sorted({*names, *SHARED})]
    versions = {}
    for module in modules:
        for cls in _classes_of(module):
            if "CONTRACT_VERSION" in vars(cls):
                versions[cls.CONTRACT] = cls.CONTRACT_VERSION
    described = {
        module.__name__: {cls.__name__: _describe(cls) for cls in _classes_of(module)}
        for module in modules
    }
    return {"versions": versions, "modules": described}


def governing_contracts(module: str) -> tuple[str, ...]:
    """Return the contracts that need a new version after a change in `module`."""
    if module in SHARED:
        return SHARED[module]
    declared = [vars(cls).get("CONTRACT") for cls in _classes_of(importlib.import_module(module))]
    return tuple(name for name in declared if name)


def carriers(snapshot: dict[str, Any]) -> dict[str, set[str]]:
    """Return the contracts that name each section, directly or through another type."""
    modules = snapshot["modules"]
    sections = {name: text for module in SECTIONS for name, text in modules.get(module, {}).items()}
    by_name: dict[str, set[str]] = {name: set() for name in sections}

    def carry(contract: str, described: dict[str, str]) -> None:
        for name in set(re.findall(r"\w+", " ".join(described.values()))) & sections.keys():
            if contract not in by_name[name]:
                by_name[name].add(contract)
                carry(contract, sections[name])

    for module, classes in modules.items():
        for contract in () if module in SECTIONS else governing_contracts(module):
            for described in classes.values():
                carry(contract, described)
    return by_name


def changes(old: dict[str, Any], new: dict[str, Any]) -> dict[str, list[str]]:
    """Return the changed modules, each with a line for every class that differs."""
    by_name: dict[str, list[str]] = {}
    for module in sorted({*old["modules"], *new["modules"]}):
        before, after = old["modules"].get(module, {}), new["modules"].get(module, {})
        lines = [
            line
            for name in sorted({*before, *after})
            for line in _differences(name, before.get(name), after.get(name))
        ]
        if lines:
            by_name[module] = lines
    return by_name


def contracts_to_raise(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return one sentence for each contract that changed without a new version."""
    sentences = []
    for module, lines in changes(old, new).items():
        if all(f"(none)  ->  {OPTIONAL}" in line for line in lines):
            continue  # an optional method does not make an existing plugin invalid
        for contract in sorted(_changed_contracts(module, old, new)):
            version = new["versions"][contract]
            if old["versions"].get(contract) == version:
                sentences.append(
                    f"{module} changed: raise CONTRACT_VERSION of {contract!r}, {version}"
                )
    return sentences


def _changed_contracts(module: str, old: dict[str, Any], new: dict[str, Any]) -> set[str]:
    """Return the contracts that need a new version because `module` has changed."""
    if module not in new["modules"]:
        return set()
    if module not in SECTIONS:
        return set(governing_contracts(module))
    before, after = old["modules"].get(module, {}), new["modules"][module]
    changed = [name for name in {*before, *after} if before.get(name) != after.get(name)]
    carried = [actual.get(name, set()) for actual in map(carriers, (old, new)) for name in changed]
    return {contract for some in carried for contract in some if contract in new["versions"]}


def _classes_of(module: ModuleType) -> list[type]:
    members = vars(module).values()
    own = [m for m in members if isinstance(m, type) and m.__module__ == module.__name__]
    return sorted(
        (cls for cls in own if not cls.__name__.startswith("_")), key=lambda c: c.__name__
    )


def _describe(cls: type) -> dict[str, str]:
    """Return the signature of every public member that `cls` itself declares, by name."""
    if issubclass(cls, enum.Enum):
        return {member.name: repr(member.value) for member in cls}
    described = {"(bases)": ", ".join(base.__name__ for base in cls.__bases__)}
    if dataclasses.is_dataclass(cls):
        for field in dataclasses.fields(cls):
            described[field.name] = f"field: {field.type}{_default_of(field)}"
    for name, field in getattr(cls, "model_fields", {}).items():
        if name in cls.__annotations__:
            default = "" if field.is_required() else f" = {field.default!r}"
            described[name] = f"field: {cls.__annotations__[name]}{default}"
    slots = (name for name in vars(cls).get("__slots__", ()) if not name.startswith("_"))
    described |= {name: "slot" for name in slots if name not in described}
    for name, annotation in vars(cls).get("__annotations__", {}).items():
        described.setdefault(name, f"attribute: {annotation}")
    for name, value in vars(cls).items():
        public = not name.startswith("_") or name == "__init__"
        generated = dataclasses.is_dataclass(cls) and name == "__init__"
        if public and not generated and (signature := _signature_of(value)):
            described[name] = signature
    return described


def _default_of(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return f" = {field.default!r}"
    return " = (made)" if field.default_factory is not dataclasses.MISSING else ""


def _signature_of(value: object) -> str:
    if isinstance(value, property):
        getter = typing.cast(Any, value.fget)
        return f"property -> {getter.__annotations__.get('return', '')}"
    kind = {staticmethod: "static ", classmethod: "class "}.get(type(value), "")
    function = getattr(value, "__func__", value)
    if not inspect.isfunction(function):
        return ""
    abstract = "abstract " if getattr(function, "__isabstractmethod__", False) else ""
    optional = OPTIONAL if getattr(function, "is_optional", False) else ""
    return f"{optional}{abstract}{kind}method{inspect.signature(function)}"


def _differences(
    name: str, before: dict[str, str] | None, after: dict[str, str] | None
) -> list[str]:
    if before is None or after is None:
        return [f"{name}: {'new' if before is None else 'gone'}"]
    return [
        f"{name}.{part}: {before.get(part, '(none)')}  ->  {after.get(part, '(none)')}"
        for part in sorted({*before, *after})
        if before.get(part) != after.get(part)
    ]


def main(arguments: list[str]) -> int:
    """Write the snapshot, or print why it was not written. Return the exit status."""
    if arguments != ["--write"]:
        print(__doc__)
        return 2
    sys.path.insert(0, str(CORE))
    new = take_snapshot()
    rejected = contracts_to_raise(json.loads(FILE.read_text("utf-8")), new) if FILE.exists() else []
    if rejected:
        print("\n".join(rejected))
        return 1
    FILE.write_text(json.dumps(new, indent=1, sort_keys=True, ensure_ascii=False) + "\n", "utf-8")
    print(f"wrote {FILE}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
