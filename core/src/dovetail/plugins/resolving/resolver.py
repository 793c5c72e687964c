"""Resolves a user's reference according to the user's rules, without importing anything.

It also orders the candidates of automatic selection: plugins preferred by the platform first, then
by rank, then first-party plugins, then by (distribution, name). Third-party plugins are included
only if the platform prefers them or the user allowed them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dovetail.errors import ContractError, PluginError, PluginNotFoundError
from dovetail.plugin_kinds import KINDS, get_kind
from dovetail.plugins.metadata.description import Describer
from dovetail.plugins.metadata.discovery import Candidate, Discovery
from dovetail.plugins.metadata.first_party import first_party_owner, normalize_distribution
from dovetail.plugins.resolving.plugin_policy import PluginPolicy
from dovetail.plugins.resolving.reference import (
    FORMS,
    FileReference,
    NamedReference,
    QualifiedReference,
    parse_reference,
)
from dovetail.plugins.resolving.refusals import (
    ambiguity,
    denied,
    namesake_note,
    not_found,
    not_in_distribution,
)
from dovetail.plugins.resolving.resolution import Resolution


class Resolver:
    """Resolves references to the plugins of one discovery, according to one policy."""

    def __init__(self, discovery: Discovery, describer: Describer, policy: PluginPolicy) -> None:
        self._discovery = discovery
        self._describer = describer
        self._policy = policy

    def candidates(self, kind: str) -> tuple[Candidate, ...]:
        """Return the installed plugins of `kind`, including denied ones."""
        return self._discovery.candidates[get_kind(kind).name]

    def resolve(self, kind: str, reference: str | type) -> Resolution:
        """Return the plugin to which `reference` refers.

        Raises the errors of `PluginRegistry.resolve`.
        """
        get_kind(kind)
        if isinstance(reference, type):
            target = f"{reference.__module__}:{reference.__qualname__}"
            return self._direct(kind, reference.__qualname__, target)
        if not isinstance(reference, str):
            raise ContractError(
                f"A {kind} must be a string or a class, not an object of the class "
                f"{type(reference).__name__!r}. Write {FORMS}, or pass the class itself."
            )
        parsed = parse_reference(reference)
        if isinstance(parsed, NamedReference):
            return self._resolve_name(kind, parsed)
        if isinstance(parsed, FileReference):
            self._require_trust(reference)
            return self._direct(kind, parsed.attribute, parsed.target)
        return self._resolve_qualified(kind, reference.strip(), parsed)

    def automatic(
        self, kind: str, preferred: Sequence[str], *, outside: bool = True
    ) -> list[Candidate]:
        """Return the plugins that may be selected automatically, in the order to try them.

        preferred: names or name@distribution, best first. Plugins that are not installed or denied
        are skipped. If `outside` is False, third-party plugins that the user did not allow are
        skipped too. Raises PluginError if several distributions have plugins of the same name.
        """
        order = [resolution for name in preferred if (resolution := self._preferred(kind, name))]
        order = [item for item in order if outside or self._may_serve(item)]
        rest = [c for c in self.candidates(kind) if c not in order and not self.exclusion(c)[0]]
        for name in dict.fromkeys(c.name for c in rest):
            same = [c for c in rest if c.name == name]
            if len(same) - any(c.first_party for c in same) > 1:
                raise ambiguity(kind, name, same, ())
        return order + sorted(rest, key=self._precedence)

    def denial(self, candidate: Candidate) -> str:
        """Return the rule that denies a plugin, as part of a sentence, or "" for none."""
        return self._policy.denial_of(candidate)

    def exclusion(self, candidate: Candidate) -> tuple[str, str]:
        """Return why a plugin is excluded from automatic selection, or "" if it is not."""
        if rule := self.denial(candidate):
            return "deny", f"denied by {rule}"
        if not candidate.first_party and not self._is_allowed(candidate):
            owner = f"{candidate.kind}:{candidate.reference}"
            return "outside", (
                "third-party plugins must be requested by name, or "
                f"allowed with plugins_allow={owner}"
            )
        for other in self.candidates(candidate.kind):
            if _identity(candidate) in self._replaced_by(other):
                return "replaces", f"replaced by {other.reference}, as plugins_allow permits"
        return "", ""

    def _may_serve(self, candidate: Candidate) -> bool:
        return self.exclusion(candidate)[0] in ("", "replaces")

    def _is_allowed(self, candidate: Candidate) -> bool:
        return self._policy.consents(candidate.kind, candidate.name, candidate.distribution)

    def _precedence(self, candidate: Candidate) -> tuple[int, bool, str, str]:
        distribution = normalize_distribution(candidate.distribution)
        rank = self._describer.entry(candidate).rank
        return -rank, not candidate.first_party, distribution, candidate.name

    def _preferred(self, kind: str, name: str) -> Candidate | None:
        try:
            resolution = self.resolve(kind, name)
        except PluginNotFoundError:
            return None
        except PluginError:
            named = [c for c in self.candidates(kind) if name in (c.name, c.reference)]
            if named and all(map(self.denial, named)):
                return None
            raise
        meant = (resolution.name, resolution.distribution)
        of_kind = self.candidates(kind)
        return next((c for c in of_kind if (c.name, c.distribution) == meant), None)

    def _resolve_name(self, kind: str, reference: NamedReference) -> Resolution:
        named = [c for c in self.candidates(kind) if c.name == reference.name]
        distribution = normalize_distribution(reference.distribution)
        matching = [
            c for c in named if distribution in ("", normalize_distribution(c.distribution))
        ]
        if named and not matching:
            raise not_in_distribution(kind, reference, named)
        if not matching:
            raise not_found(kind, reference.name, self._by_kind())
        replacers = () if distribution else self._replacers(matching)
        victims = {victim for c in replacers for victim in self._replaced_by(c)}
        left = [*replacers, *(c for c in matching if c not in replacers)]
        left = [c for c in left if _identity(c) not in victims]
        usable = [c for c in left if not self.denial(c)]
        if not usable:
            raise denied(f"{kind} {left[0].reference!r}", self.denial(left[0]))
        outside = [c for c in usable if not c.first_party]
        if len(usable) > len(outside) and not replacers:
            usable = [c for c in usable if c.first_party]  # a first-party plugin keeps its name
        if len(usable) > 1:
            replacing = [c for c in usable if self._describer.entry(c).replaces]
            raise ambiguity(kind, reference.name, usable, replacing)
        notes = [
            f"It replaces {c.reference}, as plugins_allow permits."
            for c in matching
            if _identity(c) in victims
        ]
        if usable[0].first_party:
            notes += [namesake_note(usable[0], c) for c in outside]
        return Resolution(**usable[0].identity(), notes=tuple(notes))

    def _replacers(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Return the plugins that may replace one of `candidates`."""
        identities = {_identity(candidate) for candidate in candidates}
        of_kind = self.candidates(candidates[0].kind)
        return [c for c in of_kind if not identities.isdisjoint(self._replaced_by(c))]

    def _replaced_by(self, candidate: Candidate) -> set[str]:
        """Return the plugins that a plugin replaces, or set() unless the user allowed it."""
        if not self._is_allowed(candidate) or self.denial(candidate):
            return set()
        replaces = self._describer.entry(candidate).replaces
        parts = [text.rpartition("@") for text in replaces]
        return {f"{whom}@{normalize_distribution(owner)}" for whom, _, owner in parts}

    def _resolve_qualified(self, kind: str, text: str, reference: QualifiedReference) -> Resolution:
        """Resolve a class path to the installed plugin that declares it, or to the class itself."""
        for candidate in self.candidates(kind):
            if candidate.target == reference.target or (
                reference.dotted and candidate.name == text
            ):
                if rule := self.denial(candidate):
                    raise denied(f"{kind} {candidate.reference!r}", rule)
                return Resolution(**candidate.identity())
        return self._direct(kind, reference.attribute, reference.target)

    def _direct(self, kind: str, name: str, target: str) -> Resolution:
        """Return the resolution of a class path. Raise PluginError if a rule denies it.

        A rule may name the distribution that owns the package of the class.
        """
        is_first_party = bool(first_party_owner(target))
        for owner in self._discovery.owners(target) or ("",):
            if rule := self._policy.denial(kind, name, owner, first_party=is_first_party):
                raise denied(f"{kind} {target!r}", rule)
        return Resolution(kind=kind, name=name, target=target)

    def _require_trust(self, reference: str) -> None:
        if not self._policy.trust_local_code:
            raise PluginError(
                f"{reference!r} names a file, and its code runs with all your permissions.\n"
                f"If you trust the file, pass --trust-local-code (trust_local_code=True in Python)."
            )

    def _by_kind(self) -> Mapping[str, Sequence[Candidate]]:
        return {kind: self.candidates(kind) for kind in KINDS}


def _identity(candidate: Candidate) -> str:
    owner = normalize_distribution(candidate.distribution)
    return f"{candidate.kind}:{candidate.name}@{owner}"
