"""Finds the installed plugins in entry-point metadata.

This module imports no plugin and runs no probe. It takes a few milliseconds for a hundred
distributions. It reads entry points only, so it does not know the needs of a plugin or whether the
plugin can be loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from importlib.metadata import Distribution, distributions
from itertools import takewhile
from typing import Any

from dovetail.plugin_kinds import GROUP_PREFIX, KINDS
from dovetail.plugins.metadata.first_party import (
    first_party_owner,
    first_party_package,
    is_first_party,
    normalize_distribution,
    top_package,
)
from dovetail.plugins.metadata.metadata_files import (
    MAX_ENTRY_POINTS_BYTES,
    MAX_HEADER_BYTES,
    read_metadata,
)
from dovetail.value_checks import shorten

_DISTRIBUTION = re.compile(r"[A-Z0-9]([A-Z0-9._-]{0,198}[A-Z0-9])?", re.ASCII | re.IGNORECASE)
_NAME = re.compile(r"[^\s@:/\\\[\]=]([^@:/\\\[\]=]{0,198}[^\s@:/\\\[\]=])?")
_TARGET = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_MAX_TARGET = 1000
_RESERVED = frozenset({"auto"})
"""Names with a special meaning in options."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An installed plugin, or a class that the user named directly.

    target: "module:Class" as its distribution declares it. distribution: the distribution's
    name as in its metadata. distribution and version are empty for a class that the user named
    directly.
    """

    kind: str
    name: str
    target: str
    distribution: str = ""
    version: str = ""

    @property
    def reference(self) -> str:
        """The unique reference of this plugin: "name@distribution", or its class path."""
        return f"{self.name}@{self.distribution}" if self.distribution else self.target

    @property
    def first_party(self) -> bool:
        """Whether it is a plugin of a first-party distribution."""
        return is_first_party(self.distribution, self.target)

    @property
    def keys(self) -> tuple[str, ...]:
        """The possible keys of the plugin's options in `plugin_options`."""
        return self.name, f"{self.kind}:{self.name}", self.target

    def identity(self) -> dict[str, Any]:
        """Return the fields that identify the plugin, to construct another object for it."""
        return {field.name: getattr(self, field.name) for field in fields(Candidate)}

    def __str__(self) -> str:
        """Return the plugin's name for messages: "policy 'fcfs' of dovetail-sched-fcfs 0.1.0"."""
        source = f" of {self.distribution} {self.version}" if self.distribution else ""
        return f"{self.kind} {self.name!r}{source}"


@dataclass(frozen=True, kw_only=True)
class Installation:
    """A distribution that has plugins.

    entries: (kind, name, target) of each entry point, including unknown kinds.
    metadata: access to its files.
    """

    distribution: str
    version: str
    entries: tuple[tuple[str, str, str], ...]
    metadata: Distribution

    @property
    def declared(self) -> frozenset[tuple[str, str]]:
        """The (kind, name) of each entry point of the distribution."""
        return frozenset((kind, name) for kind, name, _ in self.entries)

    @property
    def packages(self) -> tuple[str, ...]:
        """The sorted top-level packages of the distribution's plugins."""
        return tuple(sorted({top_package(target) for *_, target in self.entries}))

    @property
    def is_impostor(self) -> bool:
        """Whether a distribution has a first-party name, but plugins in other packages."""
        own = first_party_package(self.distribution)
        return bool(own) and self.packages != (own,)


@dataclass(frozen=True, kw_only=True)
class Discovery:
    """The result of a scan of installed distributions.

    candidates: for every kind, first-party plugins first, then by distribution and name.
    set_aside: sentences about declared plugins that cannot be read.
    warnings: sentences about distributions with the same name, and third-party distributions with a
    first-party name. installations: maps normalized names to distributions with plugins.
    """

    candidates: dict[str, tuple[Candidate, ...]]
    set_aside: tuple[str, ...]
    warnings: tuple[str, ...]
    installations: dict[str, Installation]

    def owners(self, target: str) -> tuple[str, ...]:
        """Return the distributions with plugins in the package of "package.module:Class".

        A first-party package has one owner, even if another distribution declares plugins in it.
        """
        if owner := first_party_owner(target):
            return (owner,)
        package = top_package(target)
        every = self.installations.values()
        return tuple(item.distribution for item in every if package in item.packages)


def discover(installed: Iterable[Distribution] | None = None) -> Discovery:
    """Return the plugins of `installed`, or of every distribution on `sys.path`.

    Of several distributions with the same name the first is used, as in `import`. If the name is
    first-party, a distribution with plugins in the first-party package takes precedence.
    """
    set_aside: list[str] = []
    by_name: dict[str, list[Installation]] = {}
    for distribution in distributions() if installed is None else installed:
        try:
            text = read_metadata(distribution, "entry_points.txt", max_bytes=MAX_ENTRY_POINTS_BYTES)
            if text is None or GROUP_PREFIX not in text:
                continue
            name, version = read_identity(distribution)
        except ValueError as error:
            set_aside.append(f"The distribution in {_place(distribution)} is not used: {error}.")
            continue
        if not _DISTRIBUTION.fullmatch(name):
            set_aside.append(
                f"The distribution in {_place(distribution)} declares plugins, but it is not used: "
                f"METADATA contains the name {shorten(name)}; a name may contain letters, digits, "
                "'-', '_' and '.' only."
            )
            continue
        installation = Installation(
            distribution=name,
            version=version,
            entries=tuple(
                (group.removeprefix(GROUP_PREFIX), entry, target)
                for group, entry, target in _entries(text)
                if group.startswith(GROUP_PREFIX)
            ),
            metadata=distribution,
        )
        by_name.setdefault(normalize_distribution(name), []).append(installation)
    warnings: list[str] = []
    installations = {name: _pick(same, warnings) for name, same in by_name.items()}
    every = [
        candidate
        for chosen in installations.values()
        for candidate in _candidates(chosen, set_aside)
    ]
    ranked = sorted(dict.fromkeys(every), key=_rank)
    by_kind = {kind: tuple(c for c in ranked if c.kind == kind) for kind in KINDS}
    return Discovery(
        candidates=by_kind,
        set_aside=tuple(set_aside),
        warnings=tuple(warnings),
        installations=installations,
    )


def _pick(candidates: Sequence[Installation], warnings: list[str]) -> Installation:
    """Return which of several installations with the same normalized name to use."""
    chosen = min(candidates, key=lambda item: item.is_impostor)
    if chosen.is_impostor:
        warnings.append(
            f"{_located(chosen)} has the name of a first-party distribution, but its plugins are "
            f"in {', '.join(chosen.packages)}, so it is treated as a third-party "
            "distribution. If you did not install it deliberately, uninstall it."
        )
    known = (chosen.version, set(chosen.entries))
    for other in candidates:
        if (other.version, set(other.entries)) != known:
            warnings.append(
                f"{_located(other)} is not used: {_located(chosen)} has the same name. "
                "Uninstall one of them."
            )
    return chosen


def _located(installation: Installation) -> str:
    folder = installation.metadata.locate_file("")
    return f"{installation.distribution} {installation.version} in {folder}"


def _candidates(installation: Installation, set_aside: list[str]) -> Iterator[Candidate]:
    """Yield the plugins of a distribution. Add a sentence to `set_aside` for each broken one."""
    for kind, name, target in installation.entries:
        if kind not in KINDS:
            continue
        if problem := _problem(name, target):
            set_aside.append(
                f"{installation.distribution} {installation.version} declares {shorten(name)} in "
                f"[{GROUP_PREFIX}{kind}] as {shorten(target)}; {problem}."
            )
            continue
        yield Candidate(
            kind=kind,
            name=name,
            target=target,
            distribution=installation.distribution,
            version=installation.version,
        )


def _problem(name: str, target: str) -> str:
    """Return what is wrong with an entry point, or "" if it is valid."""
    if name in _RESERVED:
        return f"a plugin cannot be named {name!r}, because this value means automatic selection"
    if not _NAME.fullmatch(name) or not name.isprintable():
        return "a plugin name has at most 200 characters and none of @ : / \\ [ ] ="
    if len(target) > _MAX_TARGET or not _TARGET.fullmatch(target):
        return "the target must be a class, written as 'module:Class'"
    return ""


def _place(distribution: Distribution) -> str:
    """Return the location of a distribution without a valid name."""
    folder = getattr(distribution, "_path", None) or distribution.locate_file("")
    return repr(str(folder))[:200]


def _rank(candidate: Candidate) -> tuple[bool, str, str, str]:
    distribution = normalize_distribution(candidate.distribution)
    return not candidate.first_party, distribution, candidate.name, candidate.target


def read_identity(distribution: Distribution) -> tuple[str, str]:
    """Return the name and the version of a distribution. Raise ValueError if they cannot be read.

    Does not use the email parser of the standard library, because it is slow.
    """
    files = (
        read_metadata(distribution, file, max_bytes=MAX_HEADER_BYTES, cut=True)
        for file in ("METADATA", "PKG-INFO")
    )
    text = next(filter(None, files), "")
    fields = {"name": "", "version": ""}
    for line in takewhile(str.strip, text.splitlines()):
        key, colon, value = line.partition(":")
        if colon and fields.get(key.lower()) == "":
            fields[key.lower()] = value.strip()
    version = "".join(filter(str.isprintable, fields["version"][:100]))
    return fields["name"], version


def _entries(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield (group, name, target) of an entry_points.txt, without extras after a target."""
    group = ""
    for raw in text.splitlines():
        line = raw.strip()
        if not line or line[0] in "#;":
            continue
        if line.startswith("[") and line.endswith("]"):
            group = line[1:-1].strip()
            continue
        name, equals, value = line.partition("=")
        target = value.partition("[")[0].strip() if equals else line
        yield group, name.strip() if equals else "", "".join(target.split())
