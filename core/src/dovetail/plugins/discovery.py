"""Discovery: which plugins are installed, from entry-point metadata alone.

Imports no plugin and asks no probe; a few milliseconds for a hundred distributions. Knows only
entry points: not what a plugin needs, nor whether it would load. Keeps nothing between calls.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from itertools import takewhile

from dovetail.plugins.kinds import GROUP_PREFIX, KINDS

_FIRST_PARTY_PREFIX = "dovetail-"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One installed plugin, found but not loaded.

    target: "module:Class" as its distribution declares it. distribution: as it writes its name.
    """

    kind: str
    name: str
    target: str
    distribution: str
    version: str

    @property
    def reference(self) -> str:
        """What means this plugin and no other: "name@distribution"."""
        return f"{self.name}@{self.distribution}"


@dataclass(frozen=True, kw_only=True)
class Installation:
    """A distribution that has plugins.

    declared: (kind, name) of each plugin, those of kinds unknown here among them. packages: the
    top-level packages that hold them. metadata: where its files are found.
    """

    distribution: str
    version: str
    declared: frozenset[tuple[str, str]]
    packages: tuple[str, ...]
    metadata: Distribution


@dataclass(frozen=True, kw_only=True)
class Discovery:
    """What a scan found.

    candidates: per kind (all kinds are there), first-party ones first, then by distribution and
        name. set_aside: what looked like a plugin and could not be read, each a sentence.
    installations: by the distribution's normalized name.
    """

    candidates: dict[str, tuple[Candidate, ...]]
    set_aside: tuple[str, ...]
    installations: dict[str, Installation]

    def owner(self, target: str) -> str:
        """Return the distribution in whose package "package.module:Class" is; "" for nobody's."""
        package = top_package(target)
        owners = (one for one in self.installations.values() if package in one.packages)
        return next((one.distribution for one in owners), "")


def is_first_party(distribution: str) -> bool:
    """Return whether a distribution of this name is one of ours, released in lock-step."""
    return distribution.startswith(_FIRST_PARTY_PREFIX)


def top_package(target: str) -> str:
    """Return the top-level package of "package.module:Class"."""
    return target.partition(":")[0].partition(".")[0]


def discover(installed: Iterable[Distribution] | None = None) -> Discovery:
    """Return the plugins of `installed`, or of every distribution on `sys.path`.

    Of two distributions with the same name the first counts, as it does for `import`.
    """
    found: dict[tuple[str, str, str, str], Candidate] = {}
    set_aside: list[str] = []
    installations: dict[str, Installation] = {}
    for distribution in distributions() if installed is None else installed:
        text = distribution.read_text("entry_points.txt")
        if text is None or GROUP_PREFIX not in text:
            continue
        name, version = _identity(distribution)
        if not name:
            set_aside.append(f"A distribution without a name declares plugins: {distribution!r}.")
            continue
        if (normalized := normalize_distribution(name)) in installations:
            continue
        entries = [entry for entry in _entries(text) if entry[0].startswith(GROUP_PREFIX)]
        installations[normalized] = Installation(
            distribution=name,
            version=version,
            declared=frozenset(
                (group.removeprefix(GROUP_PREFIX), one) for group, one, _ in entries
            ),
            packages=tuple(sorted({top_package(target) for *_, target in entries})),
            metadata=distribution,
        )
        for group, entry, target in entries:
            kind = group.removeprefix(GROUP_PREFIX)
            if kind not in KINDS:
                continue
            if not entry or ":" not in target:
                set_aside.append(
                    f"{name} {version} declares {entry or target!r} in [{group}] as {target!r}; "
                    f"that names no class ('module:Class')."
                )
                continue
            found[kind, normalized, entry, target] = Candidate(
                kind=kind, name=entry, target=target, distribution=name, version=version
            )
    ranked = sorted(found.values(), key=_rank)
    by_kind = {kind: tuple(c for c in ranked if c.kind == kind) for kind in KINDS}
    return Discovery(candidates=by_kind, set_aside=tuple(set_aside), installations=installations)


def normalize_distribution(name: str) -> str:
    """Return the form in which two spellings of a distribution's name are equal (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _rank(candidate: Candidate) -> tuple[bool, str, str, str]:
    distribution = normalize_distribution(candidate.distribution)
    third_party = not is_first_party(distribution)
    return third_party, distribution, candidate.name, candidate.target


def _identity(distribution: Distribution) -> tuple[str, str]:
    """Return name and version; read by hand, since parsing whole METADATA files as mail is slow."""
    text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    fields = {"name": "", "version": ""}
    for line in takewhile(str.strip, text.splitlines()):
        key, colon, value = line.partition(":")
        if colon and key.lower() in fields:
            fields[key.lower()] = value.strip()
    return fields["name"], fields["version"]


def _entries(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield (group, name, target) of an entry_points.txt; extras behind a target are dropped."""
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
