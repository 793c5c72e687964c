"""Resolving in a process that loads what another process resolved: only these are found.

The other end of `Resolution`: what one process resolved is found here by the same references, and
nothing else is.
"""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.errors import PluginError, PluginNotFoundError
from dovetail.plugin_kinds import get_kind
from dovetail.plugins.metadata.description import Describer
from dovetail.plugins.metadata.discovery import Candidate, Discovery
from dovetail.plugins.metadata.first_party import normalize_distribution
from dovetail.plugins.resolving.plugin_policy import PluginPolicy
from dovetail.plugins.resolving.resolution import Resolution
from dovetail.plugins.resolving.resolver import Resolver


class PinnedResolver(Resolver):
    """Finds references among resolutions that another process made."""

    def __init__(
        self,
        shipped: Sequence[Resolution],
        discovery: Discovery,
        describer: Describer,
        policy: PluginPolicy,
    ) -> None:
        super().__init__(discovery, describer, policy)
        self._shipped = shipped

    def candidates(self, kind: str) -> tuple[Candidate, ...]:
        """Return those of the shipped resolutions that are installed plugins of `kind`."""
        get_kind(kind)
        return tuple(
            Candidate(**one.identity())
            for one in self._shipped
            if one.kind == kind and one.distribution
        )

    def resolve(self, kind: str, reference: str | type) -> Resolution:
        """Return the shipped resolution that `reference` means.

        Raises PluginNotFoundError if there is none, PluginError if it is a file and local code is
        not trusted here.
        """
        get_kind(kind)
        mine = [one for one in self._shipped if one.kind == kind]
        if isinstance(reference, type):
            reference = f"{reference.__module__}:{reference.__qualname__}"
        for one in mine:
            if reference.strip() in (*one.keys, one.target.replace(":", "."), one.reference):
                if one.target.startswith("/"):
                    self._require_trust(one.target)
                return one
        listed = ", ".join(one.name for one in mine) or "none"
        raise PluginNotFoundError(
            f"The {kind} {reference!r} is not among what was resolved for this process: {listed}.\n"
            "Resolve it where the engine is started."
        )


def check_versions(shipped: Sequence[Resolution], discovery: Discovery) -> None:
    """Raise PluginError, with every difference, if what is installed is not what was resolved."""
    problems = [problem for one in shipped if (problem := _difference(one, discovery))]
    if problems:
        listed = "".join(f"\n  - {problem}" for problem in problems)
        raise PluginError(
            f"What is installed here is not what the engine resolved:{listed}\n"
            "Install the same distributions in the same versions everywhere."
        )


def _difference(shipped: Resolution, discovery: Discovery) -> str:
    if not shipped.distribution:
        return ""
    here = discovery.installations.get(normalize_distribution(shipped.distribution))
    if here is None:
        return f"{shipped}: {shipped.distribution} is not installed"
    if here.version != shipped.version:
        return f"{shipped}: version {here.version} is installed"
    installed = discovery.candidates.get(shipped.kind, ())
    if any((c.name, c.target) == (shipped.name, shipped.target) for c in installed):
        return ""
    return f"{shipped}: it does not declare {shipped.target} here"
