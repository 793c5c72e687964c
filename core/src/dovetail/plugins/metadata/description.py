"""Combines what discovery and the manifest say about a plugin, without importing it.

The second of three stages (discover, describe, load). The manifest of a distribution is read once,
when one of its plugins is described for the first time.
"""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.errors import PluginLoadError
from dovetail.plugins.metadata.discovery import Candidate, Discovery
from dovetail.plugins.metadata.first_party import normalize_distribution
from dovetail.plugins.metadata.manifest import Manifest, PluginEntry, read_manifest


@dataclass(frozen=True, kw_only=True)
class Description(Candidate):
    """The description of a plugin that is not loaded.

    entry: the plugin's entry in the manifest, or defaults if not `in_manifest`. A class that the
    user named directly has no manifest.
    """

    entry: PluginEntry
    in_manifest: bool = False


class Describer:
    """Describes the plugins of one discovery. Reads each manifest once, when it is needed."""

    def __init__(self, discovery: Discovery) -> None:
        self._discovery = discovery
        self._manifests: dict[str, Manifest] = {}

    @property
    def problems(self) -> tuple[str, ...]:
        """Sentences about the broken manifests read so far."""
        installations = self._discovery.installations
        return tuple(
            f"The manifest of {installations[name].distribution} {installations[name].version} "
            f"is broken, so its plugins cannot be used: {'; '.join(manifest.problems)}."
            for name, manifest in self._manifests.items()
            if manifest.problems
        )

    def read_all(self) -> None:
        """Read every manifest."""
        for name in self._discovery.installations:
            self._manifest(name)

    def describe(self, candidate: Candidate) -> Description:
        """Return the description of a plugin. Raise PluginLoadError if its manifest is broken."""
        manifest = self._manifest(normalize_distribution(candidate.distribution))
        if manifest.problems:
            listed = "".join(f"\n  - {problem}" for problem in manifest.problems)
            raise PluginLoadError(
                f"Cannot use the {candidate.kind} {candidate.name!r}: the manifest of "
                f"{candidate.distribution} {candidate.version} is broken.{listed}\n"
                f"Fix the manifest, or install another version of {candidate.distribution}."
            )
        entry = manifest.entries.get((candidate.kind, candidate.name))
        return Description(
            **candidate.identity(),
            entry=entry or PluginEntry(kind=candidate.kind, name=candidate.name),
            in_manifest=entry is not None,
        )

    def entry(self, candidate: Candidate) -> PluginEntry:
        """Return the manifest entry of a plugin, or an entry of defaults if it is not readable."""
        manifest = self._manifest(normalize_distribution(candidate.distribution))
        entry = manifest.entries.get((candidate.kind, candidate.name))
        return entry or PluginEntry(kind=candidate.kind, name=candidate.name)

    def _manifest(self, name: str) -> Manifest:
        if not name:
            return Manifest(entries={})  # a class that the user named directly has no manifest
        if name not in self._manifests:
            self._manifests[name] = read_manifest(self._discovery.installations[name])
        return self._manifests[name]
