"""Decides which candidates are tried, in which order, and which one is selected.

`evaluate` is the only code that decides which plugin is selected. Selection stops at the selected
plugin; an explanation lists every verdict. Only plugins that the user requested or allowed are
loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from dovetail.errors import PluginError, UnfitPluginError
from dovetail.plugin_kinds import get_kind
from dovetail.plugins.contracts.declared import missing_promise
from dovetail.plugins.metadata.discovery import Candidate
from dovetail.plugins.platform_results import preferred_names
from dovetail.plugins.registry import PluginRegistry
from dovetail.plugins.resolving.reference import reference_text
from dovetail.plugins.selection.precedence import automatic_order, resolve_scheduler
from dovetail.plugins.selection.rules import apply_rules
from dovetail.plugins.selection.verdict import AUTO, REJECTED, SELECTED, USABLE, Criteria, Verdict


def evaluate(registry: PluginRegistry, kind: str, criteria: Criteria) -> Iterator[Verdict]:
    """Yield a verdict on each plugin of `kind`, in the order in which an engine tries them.

    Plugins that are not tried follow at the end. At most one plugin for each reference is SELECTED.
    A fatal verdict means that the start of the engine fails. A verdict without a target stands for
    a reference that matches no plugin. registry: bound to the platform, unless `kind` is
    "platform". Raises PluginNotFoundError for an unknown kind.
    """
    verdicts: list[Verdict] = []
    for verdict in _participants(registry, kind, criteria):
        verdicts.append(verdict)
        yield verdict
    yield from _others(registry, kind, verdicts, criteria)


def no_winner(kind: str, criteria: Criteria, verdicts: Sequence[Verdict]) -> str:
    """Return the message for an automatic selection that finds no plugin, with every reason."""
    lines = [
        f"\n  - {verdict.name}: {'; '.join(verdict.reasons).rstrip('.')}" for verdict in verdicts
    ]
    if not lines:
        hint = get_kind(kind).distribution
        lines = [f" No such plugin is installed{f'; try: pip install {hint}' if hint else ''}."]
    return f"No {kind} plugin qualifies for automatic selection{_where(criteria)}.{''.join(lines)}"


def _where(criteria: Criteria) -> str:
    return f" on the platform {criteria.platform_name!r}" if criteria.platform else ""


def alternatives(registry: PluginRegistry, kind: str, criteria: Criteria) -> str:
    """Return a sentence with the plugins that automatic selection could use, or "" for none.

    For messages about a plugin that cannot be used. criteria: the references in `criteria` are
    ignored.
    """
    try:
        verdicts = list(evaluate(registry, kind, replace(criteria, references=(AUTO,))))
    except PluginError:
        return ""
    names = [verdict.name for verdict in verdicts if verdict.state in (USABLE, SELECTED)]
    return f" Plugins that can be used here: {', '.join(names)}." if names else ""


def _participants(registry: PluginRegistry, kind: str, criteria: Criteria) -> Iterator[Verdict]:
    registry.candidates(kind)  # raises an error for an unknown kind
    if criteria.references == (AUTO,):
        yield from _automatic(registry, kind, criteria)
        return
    judge_one = _scheduler if kind in ("scheduler", "policy") else _named
    for index, reference in enumerate(criteria.references, 1):
        try:
            yield from judge_one(registry, kind, index, reference, criteria)
        except PluginError as error:
            yield from _unresolved(registry, kind, index, reference, error)


def _named(
    registry: PluginRegistry, kind: str, rank: int, reference: str | type, criteria: Criteria
) -> Iterator[Verdict]:
    """Yield the verdict on a requested plugin. Every state except SELECTED is fatal."""
    resolution = registry.resolve(kind, reference)
    verdict = Verdict(**resolution.identity(), standing=criteria.why, place=rank)
    verdict = apply_rules(registry, kind, reference, verdict, criteria)
    if verdict.state == USABLE:
        yield _take(verdict, criteria)
        return
    error = verdict.error
    if error is None:
        reasons = "; ".join(verdict.reasons).rstrip(".")
        instead = alternatives(registry, kind, criteria)
        error = UnfitPluginError(
            f"The {kind} {verdict.name!r} was requested{_where(criteria)}, but it cannot be used "
            f"here: {reasons}.{instead}"
        )
    yield replace(verdict, error=error, is_fatal=True)


def _unresolved(
    registry: PluginRegistry, kind: str, rank: int, reference: str | type, error: PluginError
) -> Iterator[Verdict]:
    """Yield verdicts for an unresolved reference: on plugins of that name, or on the reference."""
    meant = [
        candidate
        for candidate in registry.candidates(kind)
        if reference in (candidate.name, candidate.reference)
    ]
    named = [Verdict(**item.identity(), place=rank) for item in meant]
    for verdict in named or [
        Verdict(kind=kind, name=reference_text(reference), target="", place=rank)
    ]:
        rejected = verdict.rejected("reference", "this plugin is requested, but it cannot be used")
        yield replace(rejected, error=error, is_fatal=True)


def _scheduler(
    registry: PluginRegistry, kind: str, rank: int, reference: str | type, criteria: Criteria
) -> Iterator[Verdict]:
    """Yield the verdict on the scheduler or policy of a reference, which may name either."""
    scheduler_cls, policy_cls = resolve_scheduler(registry, reference)
    if (policy_cls is not None) == (kind == "policy"):
        resolution = registry.resolve(kind, reference)
        verdict = Verdict(**resolution.identity(), standing=criteria.why, place=rank)
        yield replace(verdict, state=SELECTED, cls=policy_cls or scheduler_cls)
    elif policy_cls is not None:
        yield Verdict(
            kind=kind,
            name=scheduler_cls.__name__,
            target=f"{scheduler_cls.__module__}:{scheduler_cls.__qualname__}",
            place=rank,
            standing="the core's scheduler runs the requested policy",
            state=SELECTED,
            rule="policy",
            reasons=(f"{reference_text(reference)} is a policy",),
            cls=scheduler_cls,
        )


def _automatic(registry: PluginRegistry, kind: str, criteria: Criteria) -> Iterator[Verdict]:
    """Yield verdicts on the automatic candidates. The first usable one is selected."""
    platform = criteria.platform
    preferred = () if platform is None else preferred_names(platform, kind)
    try:
        order = automatic_order(registry, kind, preferred, criteria.platform_name)
    except PluginError as error:
        yield from _without_order(registry, kind, error)
        return
    verdicts: Iterator[Verdict] = (
        _evaluate_candidate(registry, item, criteria, preferred) for item in order
    )
    behind = ""
    if kind == "platform":
        # The highest rank is selected, and the failed probe might belong to that platform.
        ranked = sorted(verdicts, key=lambda verdict: -verdict.rank)
        failed = next((item.name for item in ranked if item.is_fatal), "")
        behind = f"no platform is selected, because {failed} failed" if failed else ""
        verdicts = iter(ranked)
    is_over = False
    for rank, verdict in enumerate(verdicts, 1):
        verdict = replace(verdict, place=rank, is_fatal=verdict.is_fatal and not is_over)
        if verdict.state == USABLE and behind:
            verdict = replace(verdict, reasons=(*verdict.reasons, behind))
        elif verdict.state == USABLE:
            verdict, behind = _take(verdict, criteria), f"{verdict.name} has precedence"
        elif verdict.is_fatal:
            behind = f"no {kind} is selected, because {verdict.name} failed"
        # An engine tries no candidate after the selected one or after an error.
        is_over = is_over or verdict.state == SELECTED or verdict.is_fatal
        yield verdict


def _without_order(registry: PluginRegistry, kind: str, error: PluginError) -> Iterator[Verdict]:
    """Yield fatal verdicts on candidates that cannot be ordered, because of `error`."""
    able = [
        candidate for candidate in registry.candidates(kind) if not registry.exclusion(candidate)[0]
    ]
    for verdict in [Verdict(**item.identity()) for item in able] or [
        Verdict(kind=kind, name=AUTO, target="")
    ]:
        rejected = verdict.rejected("order", "the candidates cannot be ordered; see the error")
        yield replace(rejected, error=error, is_fatal=True)


def _evaluate_candidate(
    registry: PluginRegistry, candidate: Candidate, criteria: Criteria, preferred: Sequence[str]
) -> Verdict:
    """Return the verdict on an automatic candidate, regardless of other candidates."""
    kind, reference = candidate.kind, candidate.reference
    standing = "first-party" if candidate.first_party else "allowed by plugins_allow"
    if candidate.name in preferred or reference in preferred:
        standing = f"preferred by the platform {criteria.platform_name}"
    verdict = Verdict(**candidate.identity(), standing=standing)
    try:
        rank = registry.describe(kind, reference).entry.rank
    except PluginError as error:
        return verdict.failed("manifest", error, is_fatal=registry.policy.strict)
    verdict = replace(verdict, rank=rank)
    return apply_rules(registry, kind, reference, verdict, criteria, automatic=True)


def _take(verdict: Verdict, criteria: Criteria) -> Verdict:
    """Select a usable plugin. Reject it if it lacks a required declaration of batch invariance."""
    if not criteria.batch_invariant or verdict.batch_invariant is not False:
        return replace(verdict, state=SELECTED)
    missing = missing_promise(criteria.dtype)
    error = UnfitPluginError(
        f"batch_invariant=True is set, but {verdict.name!r} cannot be used: {missing}."
    )
    rejected = replace(verdict, state=REJECTED, rule="batch_invariant")
    return replace(rejected, error=error, is_fatal=True)


def _others(
    registry: PluginRegistry, kind: str, verdicts: Sequence[Verdict], criteria: Criteria
) -> Iterator[Verdict]:
    """Yield verdicts on the plugins that are not tried."""
    known = {(verdict.name, verdict.distribution) for verdict in verdicts}
    names = " and ".join(reference_text(reference) for reference in criteria.references)
    for candidate in registry.candidates(kind):
        if (candidate.name, candidate.distribution) in known:
            continue
        rule, reason = registry.exclusion(candidate)
        if criteria.references != (AUTO,) and rule in ("", "outside"):
            rule, reason = (
                "reference",
                f"{names} is requested" if names else "no plugin is requested",
            )
        yield replace(Verdict(**candidate.identity()), rule=rule, reasons=(reason,))
