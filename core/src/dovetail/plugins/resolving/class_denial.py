"""Applies the user's rules to the class that a reference names.

A rule cannot be evaded by another name for the same class: a module that re-exports it, another
entry point, a path to its file, the class object itself, or a subclass without its own code. The
check runs once for each loaded class if rules exist.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from dovetail.clock import Clock
from dovetail.errors import PluginError
from dovetail.plugins.containment import contained
from dovetail.plugins.loading import LOCAL_PREFIX, Origin, load_target
from dovetail.plugins.metadata.discovery import Candidate, Discovery, read_identity
from dovetail.plugins.metadata.first_party import first_party_owner, top_package
from dovetail.plugins.metadata.metadata_files import MAX_RECORD_BYTES, read_metadata
from dovetail.plugins.resolving.plugin_policy import PluginPolicy

_CONTRACTS = "dovetail.interfaces"


class ClassRules:
    """Checks loaded classes against the user's rules."""

    def __init__(self, policy: PluginPolicy, discovery: Discovery, clock: Clock) -> None:
        self._policy = policy
        self._discovery = discovery
        self._clock = clock

    def denial(self, kind: str, cls: type[Any]) -> tuple[str, str]:
        """Return the forbidden class as "module:Class", and the rule. ("", "") for none.

        The forbidden class is `cls` or one of its base classes.
        """
        if not self._policy.deny and not self._policy.no_plugins:
            return "", ""
        same = list(_without_renaming(cls))
        bases: tuple[type[Any], ...] = _fact(cls, "__mro__")
        for base in bases:
            if _is_contract(base):
                continue
            rule = self._rule_on(kind, base, every=base in same) or self._rule_on_code(kind, base)
            if rule:
                return f"{_fact(base, '__module__')}:{_fact(base, '__qualname__')}", rule
        return "", ""

    def _rule_on_code(self, kind: str, cls: type[Any]) -> str:
        """Return the rule that denies a plugin whose methods `cls` contains, or "" for none."""
        for value in _fact(cls, "__dict__").values():
            function = getattr(value, "__func__", value)
            if not inspect.isfunction(function):
                continue
            home = f"{function.__globals__.get('__name__')}:{function.__qualname__}"
            home = home.rpartition(".")[0]
            for item in self._discovery.candidates[kind]:
                if item.target == home and (rule := self._policy.denial_of(item)):
                    return rule
        return ""

    def _rule_on(self, kind: str, cls: type[Any], *, every: bool) -> str:
        """Return the rule that denies a class, or "" for none.

        every: whether rules on the distribution of the class are also checked.
        """
        candidates = self._discovery.candidates[kind]
        declared = [candidate for candidate in candidates if self._is_class_of(candidate, cls)]
        for item in declared:
            if rule := self._policy.denial_of(item):
                return rule
        if not every or any(item.first_party for item in declared):
            return ""
        owners = self._owners(cls)
        is_first_party = bool(first_party_owner(_import_names(cls)[-1]))
        names = {_fact(cls, "__qualname__"), *(item.name for item in declared)}
        rules = (
            self._policy.denial(kind, name, owner, first_party=is_first_party)
            for name in sorted(names)
            for owner in owners
        )
        return next(filter(None, rules), "")

    def _is_class_of(self, candidate: Candidate, cls: type[Any]) -> bool:
        """Return whether an entry point refers to this class."""
        module, _, path = candidate.target.partition(":")
        names = _import_names(cls)
        if module in names and path == _fact(cls, "__qualname__"):
            return True
        packages = [top_package(name) for name in names]
        if module not in sys.modules and top_package(module) in packages:
            # The package is already imported, and `module` may export the class under another name.
            if not self._policy.denial_of(candidate):
                return False
            try:
                with contained(top_package(module), self._clock):
                    return load_target(candidate.target, Origin(reference=candidate.name)) is cls
            except PluginError:
                return False
        value: object = sys.modules.get(module)
        for part in path.split("."):
            value = inspect.getattr_static(value, part, None)
        return value is cls

    def _owners(self, cls: type[Any]) -> Sequence[str]:
        """Return the distributions that may contain the module of a class. ("",) for none."""
        owners: list[str] = []
        for name in _import_names(cls):
            owners += self._discovery.owners(name) or self._installed.get(top_package(name), ())
        return owners or ("",)

    @cached_property
    def _installed(self) -> Mapping[str, Sequence[str]]:
        """The distributions of each top-level package, including those without plugins."""
        return _owners_of_packages()


def _owners_of_packages() -> Mapping[str, Sequence[str]]:
    """Return the readable distributions of each top-level package."""
    owners: dict[str, list[str]] = {}
    for distribution in distributions():
        with suppress(ValueError):
            name, _ = read_identity(distribution)
            declared = read_metadata(distribution, "top_level.txt", max_bytes=MAX_RECORD_BYTES)
            record = declared or read_metadata(distribution, "RECORD", max_bytes=MAX_RECORD_BYTES)
            for package in {_top_level(line) for line in (record or "").splitlines()}:
                owners.setdefault(package, []).append(name)
    return owners


def _top_level(line: str) -> str:
    """Return the import name at the start of a line of top_level.txt or RECORD."""
    first = line.strip().strip('"').partition(",")[0].partition("/")[0]
    return first.partition(".")[0]


def _is_contract(cls: type[Any]) -> bool:
    return cls is object or f"{_fact(cls, '__module__')}.".startswith(f"{_CONTRACTS}.")


def _without_renaming(cls: type[Any]) -> Iterator[type[Any]]:
    """Yield a class and its bases, up to the first class that adds code."""
    yield cls
    if any(_is_code(value) for value in _fact(cls, "__dict__").values()):
        return
    for base in _fact(cls, "__bases__"):
        if not _is_contract(base):
            yield from _without_renaming(base)


def _is_code(value: object) -> bool:
    if isinstance(value, (classmethod, staticmethod, property)):
        return True
    return callable(value) and not isinstance(value, type)


def _fact(cls: type[Any], name: str) -> Any:
    """Return an attribute of a class, bypassing its metaclass."""
    return type.__getattribute__(cls, name)


def _import_names(cls: type[Any]) -> list[str]:
    """Return the possible import names of the module of a class.

    These are the module's name, unless it was loaded from a path, and the names of its file and of
    the target of a symbolic link.
    """
    module_name: str = _fact(cls, "__module__")
    file = getattr(sys.modules.get(module_name), "__file__", None)
    names = [] if module_name.startswith(LOCAL_PREFIX) else [module_name]
    if isinstance(file, str):
        path = Path(file)
        names += [] if names else [_name_of_file(path)]
        if path.resolve() != path.absolute():
            names.append(_name_of_file(path.resolve()))
    return list(dict.fromkeys(names)) or [module_name]


def _name_of_file(path: Path) -> str:
    """Return the import name of a file, including its parent packages."""
    parts = [] if path.stem == "__init__" else [path.stem]
    folder = path.parent
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    return ".".join(parts)
