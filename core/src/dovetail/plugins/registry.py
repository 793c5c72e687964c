"""The plugin registry: from a user's reference to a class that meets its contract.

One object, handed to whoever has to choose; nothing is global, and two engines may have two.
Resolving imports nothing; loading imports what was chosen and no more. It does not know which
plugin suits a machine (the platform's `prefer`) nor what a plugin's options mean.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import Distribution
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from dovetail.errors import ContractError, PluginError, PluginNotFoundError, nearest
from dovetail.plugins.contract import check_contract
from dovetail.plugins.discovery import Candidate, Discovery, discover, normalize_distribution
from dovetail.plugins.kinds import KINDS, get_kind
from dovetail.plugins.loading import (
    Origin,
    find_attribute,
    load_dotted,
    load_file,
    load_target,
)
from dovetail.plugins.reference import (
    FORMS,
    FileReference,
    NamedReference,
    QualifiedReference,
    parse_reference,
)


@dataclass(frozen=True, kw_only=True)
class Resolution:
    """What a reference turned out to mean.

    name: the plugin's name, or the class path where it was named directly. target: "module:Class"
    or "/file.py:Class". distribution, version: whose entry point it is; empty for none's.
    notes: what was assumed in its favour when its contract was checked.
    """

    kind: str
    name: str
    target: str
    distribution: str = ""
    version: str = ""
    notes: tuple[str, ...] = ()


class PluginRegistry:
    """Finds, resolves and loads plugins.

    The scan of installed distributions happens once, when first needed. Loaded classes are kept
    by reference. A failed load is not kept: it is tried again when asked again.
    """

    def __init__(
        self,
        *,
        trust_local_code: bool = False,
        distributions: Iterable[Distribution] | None = None,
    ) -> None:
        """Make a registry over `distributions` (iterated once), or over everything installed.

        trust_local_code: allow references to files ("./file.py:Class").
        """
        self.trust_local_code = trust_local_code
        self._distributions = distributions
        self._loaded: dict[tuple[str, str | type], tuple[type[Any], Resolution]] = {}
        self._files: dict[Path, ModuleType] = {}

    @cached_property
    def _discovery(self) -> Discovery:
        return discover(self._distributions)

    @property
    def resolutions(self) -> tuple[Resolution, ...]:
        """Everything loaded so far, in the order of loading, each once."""
        return tuple(dict.fromkeys(resolution for _, resolution in self._loaded.values()))

    @property
    def set_aside(self) -> tuple[str, ...]:
        """What looked like a plugin but could not be read, each a sentence."""
        return self._discovery.set_aside

    def candidates(self, kind: str) -> tuple[Candidate, ...]:
        """Return the installed plugins of `kind`: first-party first, then by distribution, name.

        Imports none of them. Raises PluginNotFoundError for an unknown kind.
        """
        return self._discovery.candidates[get_kind(kind).name]

    def resolve(self, kind: str, reference: str | type) -> Resolution:
        """Return what `reference` means as a `kind`, importing nothing.

        Raises PluginNotFoundError if no plugin has that name, and PluginError if several have it,
        if the reference has no known form, or if it is a file and local code is not trusted.
        A class that was named directly is not looked for until it is loaded.
        """
        get_kind(kind)
        if isinstance(reference, type):
            target = f"{reference.__module__}:{reference.__qualname__}"
            return Resolution(kind=kind, name=reference.__qualname__, target=target)
        if not isinstance(reference, str):
            raise ContractError(
                f"A {kind} is chosen by a string or a class, not by {type(reference).__name__!r} "
                f"objects. Write {FORMS}, or give the class itself."
            )
        parsed = parse_reference(reference)
        if isinstance(parsed, NamedReference):
            return self._resolve_name(kind, parsed)
        if isinstance(parsed, FileReference):
            self._require_trust(reference)
            return Resolution(kind=kind, name=parsed.attribute, target=parsed.target)
        return self._resolve_qualified(kind, reference.strip(), parsed)

    def load(self, kind: str, reference: str | type) -> type[Any]:
        """Return the class that `reference` means, imported and held to the contract of `kind`.

        Raises as `resolve`; besides PluginLoadError if importing fails, PluginNotFoundError if a
        module or class named directly does not exist, ContractError with everything that is wrong.
        """
        key = (kind, reference)
        if key not in self._loaded:
            self._loaded[key] = self._load(self.resolve(kind, reference), reference)
        return self._loaded[key][0]

    def _load(self, resolution: Resolution, reference: str | type) -> tuple[type[Any], Resolution]:
        loaded: object
        if isinstance(reference, type):
            loaded = reference
        else:
            whose = f"{resolution.distribution} {resolution.version}".strip()
            origin = Origin(asked=reference, distribution=whose)
            loaded, target = self._import(resolution, reference, origin)
            resolution = replace(resolution, target=target)
        notes = check_contract(resolution.kind, loaded)
        return cast("type[Any]", loaded), replace(resolution, notes=notes)

    def _import(self, resolution: Resolution, text: str, origin: Origin) -> tuple[object, str]:
        """Return the object that a resolution names, and its target as it turned out to be."""
        parsed = parse_reference(text)
        if isinstance(parsed, FileReference):
            if parsed.path not in self._files:
                self._files[parsed.path] = load_file(parsed.path, origin)
            loaded = find_attribute(self._files[parsed.path], parsed.attribute, origin)
            return loaded, resolution.target
        if isinstance(parsed, QualifiedReference) and parsed.dotted and not origin.distribution:
            return load_dotted(resolution.target, origin)
        return load_target(resolution.target, origin), resolution.target

    def _resolve_name(self, kind: str, asked: NamedReference) -> Resolution:
        candidates = self.candidates(kind)
        named = [c for c in candidates if c.name == asked.name]
        wanted = normalize_distribution(asked.distribution)
        found = [c for c in named if wanted in ("", normalize_distribution(c.distribution))]
        if len(found) == 1:
            return _resolution(found[0])
        if found:
            raise _ambiguity(kind, asked.name, found)
        if named:
            raise PluginNotFoundError(
                f"Distribution {asked.distribution!r} has no {kind} {asked.name!r}."
                f"{nearest(asked.distribution, [c.distribution for c in named])}\n"
                f"It is in {_listed(named)}. Write {named[0].name}@{named[0].distribution}."
            )
        raise self._not_found(kind, asked.name)

    def _resolve_qualified(self, kind: str, text: str, asked: QualifiedReference) -> Resolution:
        """Resolve a class path; one that an installed plugin declares is that plugin."""
        for candidate in self.candidates(kind):
            if candidate.target == asked.target or (asked.dotted and candidate.name == text):
                return _resolution(candidate)
        return Resolution(kind=kind, name=asked.attribute, target=asked.target)

    def _require_trust(self, reference: str) -> None:
        if not self.trust_local_code:
            raise PluginError(
                f"{reference!r} names a file, and a file is run with all your rights.\n"
                f"If you trust it, pass --trust-local-code (trust_local_code=True in Python)."
            )

    def _not_found(self, kind: str, name: str) -> PluginNotFoundError:
        candidates = self.candidates(kind)
        hint = nearest(name, [c.name for c in candidates])
        elsewhere = [k for k in KINDS if any(c.name == name for c in self.candidates(k))]
        if elsewhere and not hint:
            hint = f" (There is a plugin of that name of kind {', '.join(elsewhere)}.)"
        installed = f"Installed: {_listed(candidates)}." if candidates else "None is installed."
        return PluginNotFoundError(
            f"There is no {kind} plugin {name!r}.{hint}\n{installed}\nWrite {FORMS}."
        )


def _resolution(candidate: Candidate) -> Resolution:
    return Resolution(
        kind=candidate.kind,
        name=candidate.name,
        target=candidate.target,
        distribution=candidate.distribution,
        version=candidate.version,
    )


def _ambiguity(kind: str, name: str, found: list[Candidate]) -> PluginError:
    """Return the error for one name with several owners, saying what to write for each."""
    if len({normalize_distribution(c.distribution) for c in found}) == len(found):
        choices = [f"{c.name}@{c.distribution}" for c in found]
    else:
        choices = [c.target for c in found]
    lines = [f"{c.distribution} {c.version} ({c.target})" for c in found]
    return PluginError(
        f"Several plugins are the {kind} {name!r}: {', '.join(lines)}.\n"
        f"Write {' or '.join(choices)}, or uninstall all but one."
    )


def _listed(candidates: Iterable[Candidate]) -> str:
    """Return the names by distribution: "a, b (dist 1.0); c (other 2.0)"."""
    by_distribution: dict[str, list[str]] = {}
    for candidate in candidates:
        whose = f"{candidate.distribution} {candidate.version}"
        by_distribution.setdefault(whose, []).append(candidate.name)
    return "; ".join(f"{', '.join(names)} ({whose})" for whose, names in by_distribution.items())
