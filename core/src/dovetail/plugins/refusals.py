"""The words of refusals: no such plugin, several of one name, denied by the user's rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from dovetail.errors import PluginError, PluginNotFoundError, nearest
from dovetail.plugins.discovery import Candidate
from dovetail.plugins.first_party import normalize_distribution
from dovetail.plugins.reference import FORMS, NamedReference


def not_found(
    kind: str, name: str, by_kind: Mapping[str, Sequence[Candidate]]
) -> PluginNotFoundError:
    """Return the error for a name that nobody has: the nearest, and all there are."""
    candidates = by_kind[kind]
    hint = nearest(name, [c.name for c in candidates])
    elsewhere = [k for k in by_kind if any(c.name == name for c in by_kind[k])]
    if elsewhere and not hint:
        hint = f" (There is a plugin of that name of kind {', '.join(elsewhere)}.)"
    installed = f"Installed: {listed(candidates)}." if candidates else "None is installed."
    return PluginNotFoundError(
        f"There is no {kind} plugin {name!r}.{hint}\n{installed}\nWrite {FORMS}."
    )


def not_in_distribution(
    kind: str, asked: NamedReference, named: Sequence[Candidate]
) -> PluginNotFoundError:
    """Return the error for a name that another distribution has."""
    return PluginNotFoundError(
        f"Distribution {asked.distribution!r} has no {kind} {asked.name!r}."
        f"{nearest(asked.distribution, [c.distribution for c in named])}\n"
        f"It is in {listed(named)}. Write {named[0].reference}."
    )


def ambiguity(
    kind: str, name: str, found: Sequence[Candidate], replacers: Sequence[Candidate]
) -> PluginError:
    """Return the error for one name with several owners, saying what to write for each.

    replacers: those that would replace another, if the user let them.
    """
    if len({normalize_distribution(c.distribution) for c in found}) == len(found):
        choices = [c.reference for c in found]
    else:
        choices = [c.target for c in found]
    lines = [f"{c.distribution} {c.version} ({c.target})" for c in found]
    consent = "".join(
        f"\n{c.distribution} wants to replace its namesake; let it with "
        f"plugins_allow=['{kind}:{c.reference}']."
        for c in replacers
    )
    return PluginError(
        f"Several plugins are the {kind} {name!r}: {', '.join(lines)}.\n"
        f"Write {' or '.join(choices)}, deny one with plugins_deny, or uninstall all but one."
        f"{consent}"
    )


def namesake_note(kept: Candidate, other: Candidate) -> str:
    """Return that a first-party plugin keeps its name beside an outside one of the same name."""
    return (
        f"The {kept.kind} {kept.name!r} is that of {kept.distribution}; {other.distribution} "
        f"{other.version} declares one of the same name, which is not used. Write "
        f"{other.reference!r} to choose that one, or uninstall {other.distribution}."
    )


def denied(what: str, rule: str) -> PluginError:
    """Return the error for a plugin that the user's rules forbid."""
    return PluginError(
        f"The {what} was asked for, but it is denied by {rule}.\n"
        "Change the rule, or choose another plugin."
    )


def listed(candidates: Iterable[Candidate]) -> str:
    """Return the names by distribution: "a, b (dist 1.0); c (other 2.0)"."""
    by_distribution: dict[str, list[str]] = {}
    for candidate in candidates:
        whose = f"{candidate.distribution} {candidate.version}"
        by_distribution.setdefault(whose, []).append(candidate.name)
    return "; ".join(f"{', '.join(names)} ({whose})" for whose, names in by_distribution.items())
