"""Errors for references that match no plugin, several plugins or a denied plugin."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import accumulate

from dovetail.errors import PluginError, PluginNotFoundError, nearest
from dovetail.plugin_kinds import get_kind
from dovetail.plugins.metadata.discovery import Candidate
from dovetail.plugins.metadata.first_party import normalize_distribution
from dovetail.plugins.resolving.reference import FORMS, NamedReference

_DIGITS = re.compile(r"\d+")
_MAX_MODEL_NAMES = 560
"""Maximum characters of the list of models in a message."""
_GENERATES = "ForCausalLM"
"""The ending of architectures that generate text."""
_MAX_COMPARED = 100
"""Number of leading characters of an architecture name that are compared with models."""


def not_found(
    kind: str, name: str, by_kind: Mapping[str, Sequence[Candidate]]
) -> PluginNotFoundError:
    """Return the error for an unknown name, with the most similar name and all names."""
    if kind == "model":
        return _unknown_architecture(name, by_kind[kind])
    kinds = (kind, *get_kind(kind).also_accepts)
    candidates = [item for accepted in kinds for item in by_kind[accepted]]
    hint = nearest(name, [c.name for c in candidates])
    elsewhere = [k for k in by_kind if any(c.name == name for c in by_kind[k])]
    if elsewhere and not hint:
        hint = f" (Kinds that have a plugin with this name: {', '.join(elsewhere)}.)"
    installed = (
        f"Installed: {listed(candidates)}." if candidates else "No such plugin is installed."
    )
    return PluginNotFoundError(
        f"There is no {kind} plugin {name!r}.{hint}\n{installed}\nWrite {FORMS}."
    )


def _unknown_architecture(name: str, models: Sequence[Candidate]) -> PluginNotFoundError:
    """Return the error for an architecture without a model. Hint at a probable spelling mistake."""
    meant = [model.name for model in models if is_misspelled(name, model.name)]
    hint = f" Did you mean {meant[0]!r}?" if meant else ""
    installed = (
        f"Installed models: {listed_models(models, name)}." if models else "No model is installed."
    )
    return PluginNotFoundError(
        f"No installed plugin has a model of the architecture {name!r}.{hint}\n{installed}\n"
        "Install a plugin for this architecture, or write one: dovetail plugins new model NAME."
    )


def listed_models(models: Iterable[Candidate], name: str = "") -> str:
    """Return the sorted names of models as text of bounded length.

    If not all names fit, those of models that generate text are preferred, and among these the
    names that are similar to `name`.
    """
    ordered = sorted(models, key=lambda model: _preference(model.name, name))
    lengths = accumulate(len(model.name) + len(", ") for model in ordered)
    num_named = sum(length <= _MAX_MODEL_NAMES for length in lengths)
    num_others = len(ordered) - num_named
    others = f" and {num_others} others (dovetail plugins list model)" if num_others else ""
    return listed(sorted(ordered[:num_named], key=lambda model: model.name)) + others


def _preference(model: str, name: str) -> tuple[bool, float, str]:
    """Return a sort key: models that generate text first, then models similar to `name`."""
    similarity = SequenceMatcher(None, name[:_MAX_COMPARED], model).ratio()
    return not model.endswith(_GENERATES), -similarity, model


def is_misspelled(name: str, known: str) -> bool:
    """Return whether `name` differs from `known` by one added, missing or swapped letter.

    A different digit or a different letter in the family's name means another architecture, such as
    Qwen3 or Mixtral.
    """
    if name.casefold() == known.casefold():
        return True
    if _DIGITS.findall(name) != _DIGITS.findall(known) or abs(len(name) - len(known)) > 1:
        return False
    pairs = zip(name, known, strict=False)
    start = next((index for index, (item, other) in enumerate(pairs) if item != other), len(known))
    if len(name) == len(known):
        swapped = known[start + 1 : start + 2] + known[start : start + 1]
        ending = known.find("For")
        replaced = start > ending > 0 and name[start + 1 :] == known[start + 1 :]
        return replaced or name[start:] == swapped + known[start + 2 :]
    longer, shorter = sorted((name, known), key=len, reverse=True)
    return longer[start + 1 :] == shorter[start:]


def not_in_distribution(
    kind: str, reference: NamedReference, named: Sequence[Candidate]
) -> PluginNotFoundError:
    """Return the error for a plugin name that the requested distribution does not have."""
    return PluginNotFoundError(
        f"Distribution {reference.distribution!r} has no {kind} {reference.name!r}."
        f"{nearest(reference.distribution, [c.distribution for c in named])}\n"
        f"A plugin of this name is in {listed(named)}. Write {named[0].reference}."
    )


def ambiguity(
    kind: str, name: str, candidates: Sequence[Candidate], replacers: Sequence[Candidate]
) -> PluginError:
    """Return the error for a name that several plugins have, with a unique reference of each.

    replacers: the plugins that could replace another one if the user allowed it.
    """
    if len({normalize_distribution(c.distribution) for c in candidates}) == len(candidates):
        choices = [c.reference for c in candidates]
    else:
        choices = [c.target for c in candidates]
    lines = [f"{c.distribution} {c.version} ({c.target})" for c in candidates]
    consent = "".join(
        f"\n{c.distribution} can replace the plugin of the same name; allow it with "
        f"plugins_allow=['{kind}:{c.reference}']."
        for c in replacers
    )
    return PluginError(
        f"Several distributions have a {kind} plugin {name!r}: {', '.join(lines)}.\n"
        f"Write {' or '.join(choices)}, deny one with plugins_deny, or uninstall all but one."
        f"{consent}"
    )


def namesake_note(selected: Candidate, other: Candidate) -> str:
    """Return a note that a third-party plugin with a first-party plugin's name is not used."""
    return (
        f"The {selected.kind} {selected.name!r} of {selected.distribution} is used; "
        f"{other.distribution} {other.version} has a plugin of the same name, which is not used. "
        f"Write {other.reference!r} to choose it, or uninstall {other.distribution}."
    )


def denied(what: str, rule: str) -> PluginError:
    """Return the error for a plugin that the user's rules forbid."""
    return PluginError(
        f"The {what} was requested, but it is denied by {rule}.\n"
        "Change the rule, or choose another plugin."
    )


def listed(candidates: Iterable[Candidate]) -> str:
    """Return the names, grouped by distribution: "a, b (dist 1.0). C (other 2.0)"."""
    by_distribution: dict[str, list[str]] = {}
    for candidate in candidates:
        owner = f"{candidate.distribution} {candidate.version}"
        by_distribution.setdefault(owner, []).append(candidate.name)
    return "; ".join(
        f"{', '.join(dict.fromkeys(names))} ({owner})" for owner, names in by_distribution.items()
    )
