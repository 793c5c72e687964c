"""Explanations: every candidate for a place, taken or not, with every reason, in order.

Says what `selection` decides and why, as data. The two are apart because choosing stops at the
first that is able, while explaining goes through all of them; a test holds them together. Loads
only what choosing might load: a plugin that nobody asked for or allowed runs no code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dovetail.errors import PluginError
from dovetail.interfaces.attention import AttentionCapabilities, AttentionRequirements
from dovetail.interfaces.platform import Probe
from dovetail.plugins.admission import check_probe, probe_failure
from dovetail.plugins.batch_promise import missing_promise, promises_equal_bits
from dovetail.plugins.device_fit import device_refusal
from dovetail.plugins.discovery import Candidate
from dovetail.plugins.first_party import normalize_distribution
from dovetail.plugins.platform_answers import check_info
from dovetail.plugins.registry import PluginRegistry
from dovetail.plugins.resolution import Resolution
from dovetail.plugins.selection import (
    AUTO,
    attention_refusals,
    automatic_order,
    choose_scheduler,
)

TAKEN = "taken"
ABLE = "able"
"""It could serve, but another goes before it."""
REFUSED = "refused"
"""It cannot serve here, or does not do what is asked."""
FAILED = "failed"
"""It could not be described or loaded, or its probe failed."""
UNKNOWN = "unknown"
"""It would be the first to be tried, but nobody knows what the model asks of it."""
OUT = "out"
"""It does not take part: denied, replaced, not allowed, waiting to be asked, or not asked for."""

_PROBED = frozenset({"attention", "executor", "linear_method", "ops", "platform", "worker"})
"""Kinds whose probes are run when they are chosen; the others are simply loaded."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a configuration wants of one kind.

    references: what is asked for, in order; ("auto",) for the first that is able, () for none.
    why: where that comes from. ask: what an attention backend has to do; None if that is not known.
    config_requirements: the part of an ask that the configuration alone decides (heads of size 0),
    for attention whose `requirements` is None. platform, device_type, preferred: the platform's
    name, its device as tensors are told it, and the plugins of this kind that it prefers. dtype: of
    the model; "" if it is not known. batch_invariant: only parts that promise equal bits in every
    batch will do.
    """

    references: tuple[str | type, ...]
    why: str = ""
    requirements: AttentionRequirements | None = None
    config_requirements: AttentionRequirements | None = None
    platform: str = ""
    device_type: str = ""
    preferred: tuple[str, ...] = ()
    dtype: str = ""
    batch_invariant: bool = False


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What becomes of one candidate.

    place: when it is tried, from 1; 0 if it is not. standing: what gives it that place. state: one
    of this module's words. reasons: for the state, each a phrase or sentence. unclear: its probe
    failed, so that it said neither yes nor no. batch_invariant: whether it promises equal bits in
    every batch in the dtype of the model, on which seeded requests rely; None for kinds that make
    no such promise, and for one that was not loaded.
    """

    name: str
    target: str
    distribution: str = ""
    version: str = ""
    rank: int = 0
    place: int = 0
    standing: str = ""
    state: str = OUT
    reasons: tuple[str, ...] = ()
    unclear: bool = False
    batch_invariant: bool | None = None

    @classmethod
    def of(cls, found: Candidate | Resolution, *, standing: str = "") -> Verdict:
        """Return the verdict on a plugin of which nothing has been said yet."""
        return cls(
            name=found.name,
            target=found.target,
            distribution=found.distribution,
            version=found.version,
            standing=standing,
        )


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Who fills a place and why.

    verdicts: in the order in which candidates are tried, then those that are not. error: why the
    place stays empty; "" if it does not, or if nobody is wanted.
    """

    kind: str
    wanted: Wanted
    verdicts: tuple[Verdict, ...]
    error: str = ""

    @property
    def chosen(self) -> tuple[Verdict, ...]:
        """Those that are taken."""
        return tuple(verdict for verdict in self.verdicts if verdict.state == TAKEN)


def explain(registry: PluginRegistry, kind: str, wanted: Wanted) -> Explanation:
    """Return what becomes of every plugin of `kind`; raise PluginNotFoundError for no such kind.

    registry: bound to the platform, unless `kind` is "platform". Sets nothing aside.
    """
    registry.candidates(kind)
    if kind in ("scheduler", "policy") and wanted.references:
        return _explain_scheduler(registry, kind, wanted)
    automatic = wanted.references == (AUTO,)
    found = (_explain_automatic if automatic else _explain_picks)(registry, kind, wanted)
    return _with_promises(found)


def alternatives(registry: PluginRegistry, kind: str, wanted: Wanted) -> str:
    """Return a sentence that names what could be taken unasked; "" if nothing can.

    For messages about a pick that cannot be used. wanted: its references do not matter.
    """
    try:
        found = explain(registry, kind, replace(wanted, references=(AUTO,)))
    except PluginError:
        return ""
    names = [one.name for one in found.verdicts if one.state in (ABLE, TAKEN)]
    return f" What can be used here: {', '.join(names)}." if names else ""


def _explain_picks(registry: PluginRegistry, kind: str, wanted: Wanted) -> Explanation:
    """Explain places for those whom the user named, and for nobody else."""
    verdicts: list[Verdict] = []
    errors: list[str] = []
    unknown: list[str | type] = []
    for place, reference in enumerate(wanted.references, 1):
        try:
            meant = registry.resolve(kind, reference)
        except PluginError as refusal:
            errors.append(str(refusal))
            unknown.append(reference)
            continue
        verdict = replace(Verdict.of(meant, standing=wanted.why), place=place)
        verdict = _judge(registry, kind, reference, verdict, wanted)
        if verdict.state == ABLE:
            verdict = replace(verdict, state=TAKEN)
        else:
            told = "; ".join(verdict.reasons).rstrip(".")
            instead = alternatives(registry, kind, wanted)
            errors.append(f"{verdict.name!r} is asked for, but: {told}.{instead}")
        verdicts.append(verdict)
    names = " and ".join(map(str, wanted.references))
    otherwise = f"{names} is asked for" if names else "nobody is asked for"
    verdicts += _asked_in_vain(_others(registry, kind, verdicts, otherwise), unknown)
    error = "\n".join(errors)
    return Explanation(kind=kind, wanted=wanted, verdicts=tuple(verdicts), error=error)


def _explain_automatic(registry: PluginRegistry, kind: str, wanted: Wanted) -> Explanation:
    """Explain a place that goes to the first candidate that is able."""
    try:
        order = automatic_order(registry, kind, wanted.preferred, wanted.platform)
    except PluginError as refusal:
        rest = _others(registry, kind, (), "the choice is not clear")
        return Explanation(kind=kind, wanted=wanted, verdicts=tuple(rest), error=str(refusal))
    verdicts = [_in_order(registry, candidate, wanted) for candidate in order]
    # All platforms are probed, and a probe that fails lets none of them win.
    error = next((v.reasons[0] for v in verdicts if v.unclear and kind == "platform"), "")
    if kind == "platform":
        verdicts.sort(key=lambda verdict: -verdict.rank)
    verdicts = [replace(verdict, place=place) for place, verdict in enumerate(verdicts, 1)]
    first = next((verdict for verdict in verdicts if verdict.state == ABLE), None)
    tried = verdicts[: verdicts.index(first)] if first and kind != "platform" else verdicts
    failed = [verdict for verdict in tried if verdict.state == FAILED]
    if registry.policy.strict and failed:
        error = error or f"plugins_strict: {failed[0].reasons[0]}"
    if first is None:
        error = error or f"No {kind} that may be taken unasked can be used."
    elif not error:
        behind = (f"{first.name} goes before it",)
        verdicts = [replace(v, reasons=behind) if v.state == ABLE else v for v in verdicts]
        verdicts[first.place - 1] = replace(first, state=TAKEN)
    verdicts += _others(registry, kind, verdicts, "")
    return Explanation(kind=kind, wanted=wanted, verdicts=tuple(verdicts), error=error)


def _explain_scheduler(registry: PluginRegistry, kind: str, wanted: Wanted) -> Explanation:
    """Explain the place of the scheduler or that of its policy: one reference means either."""
    (reference,) = wanted.references
    verdicts: list[Verdict] = []
    error, otherwise = "", f"{reference} is asked for"
    try:
        scheduler_cls, policy_cls = choose_scheduler(registry, reference)
    except PluginError as refusal:
        error = str(refusal)
    else:
        is_policy = policy_cls is not None
        if is_policy == (kind == "policy"):
            meant = registry.resolve(kind, reference)
            made = Verdict.of(meant, standing=wanted.why)
            verdicts = [replace(made, place=1, state=TAKEN)]
        elif is_policy:
            verdicts = [_of_core(scheduler_cls, f"the policy {reference} is asked for")]
        else:
            otherwise = f"the scheduler {reference} is asked for, not a policy"
    rest = _others(registry, kind, verdicts, otherwise)
    verdicts += _asked_in_vain(rest, (reference,)) if error else rest
    return Explanation(kind=kind, wanted=wanted, verdicts=tuple(verdicts), error=error)


def _of_core(cls: type[Any], reason: str) -> Verdict:
    target = f"{cls.__module__}:{cls.__qualname__}"
    standing = "the core's own mechanism"
    return Verdict(
        name=cls.__name__, target=target, place=1, standing=standing, state=TAKEN, reasons=(reason,)
    )


def _with_promises(explanation: Explanation) -> Explanation:
    """Add a reason to each part that does not promise equal bits in every batch.

    Where only parts that do are wanted, one that would be taken is refused, as an engine refuses it
    (attention is asked for the promise like for any other feature).
    """
    wanted, verdicts = explanation.wanted, list(explanation.verdicts)
    missing, error = missing_promise(wanted.dtype), explanation.error
    for index, one in enumerate(verdicts):
        if one.batch_invariant is not False or one.state not in (TAKEN, ABLE):
            continue
        one = replace(one, reasons=(*one.reasons, missing))
        if one.state == TAKEN and wanted.batch_invariant:
            error = f"batch_invariant=True is asked, but {one.name!r} cannot be taken: {missing}."
            one = replace(one, state=REFUSED)
        verdicts[index] = one
    return replace(explanation, verdicts=tuple(verdicts), error=error)


def _in_order(registry: PluginRegistry, candidate: Candidate, wanted: Wanted) -> Verdict:
    """Return the verdict on a candidate that may be taken unasked, as if it were the only one."""
    kind, reference = candidate.kind, candidate.reference
    standing = "first-party" if candidate.first_party else "allowed by plugins_allow"
    if candidate.name in wanted.preferred or reference in wanted.preferred:
        standing = f"the platform {wanted.platform} prefers it"
    verdict = Verdict.of(candidate, standing=standing)
    try:
        rank = registry.describe(kind, reference).entry.rank
    except PluginError as error:
        return replace(verdict, state=FAILED, reasons=(str(error),))
    verdict = _judge(registry, kind, reference, replace(verdict, rank=rank), wanted)
    if kind != "platform" or verdict.state != ABLE:
        return verdict
    platform_cls = registry.load(kind, reference)
    verdict = replace(verdict, rank=rank or platform_cls.rank)
    if platform_cls.automatic:
        return verdict
    return replace(verdict, state=OUT, reasons=("it waits to be asked for by name",))


def _judge(
    registry: PluginRegistry,
    kind: str,
    reference: str | type,
    verdict: Verdict,
    wanted: Wanted,
) -> Verdict:
    """Return `verdict` with its state and reasons: probed, loaded, held against what is asked."""
    try:
        unmet = registry.unmet_needs(kind, reference)
        if unmet:
            return replace(verdict, state=REFUSED, reasons=(unmet,))
        probe = registry.probe(kind, reference) if kind in _PROBED else Probe(usable=True)
    except PluginError as error:
        return replace(verdict, state=FAILED, reasons=(str(error),), unclear=True)
    if not probe.usable:
        return replace(verdict, state=REFUSED, reasons=tuple(probe.reasons))
    try:
        cls = registry.load(kind, reference)
        if kind == "platform":
            check_info(cls)
    except PluginError as error:
        return replace(verdict, state=FAILED, reasons=(str(error),))
    promised = promises_equal_bits(kind, cls, wanted.dtype)
    verdict = replace(verdict, batch_invariant=promised)
    if refusal := device_refusal(kind, cls, wanted.device_type):
        return replace(verdict, state=REFUSED, reasons=(refusal,))
    if kind == "attention" and (reasons := _attention_reasons(cls, wanted)):
        return replace(verdict, state=REFUSED, reasons=tuple(reasons))
    # Only a platform that is chosen without being asked for may stand back; see `_in_order`.
    if kind == "platform":
        return _probed(cls, verdict)
    # What a probe says of what can be used is good to know, too.
    return replace(verdict, state=ABLE, reasons=tuple(probe.reasons))


def _attention_reasons(backend: type[Any], wanted: Wanted) -> list[str]:
    """Return every reason against a backend that is known: without heads, those of the config."""
    if wanted.requirements is not None:
        return attention_refusals(backend, wanted.requirements)
    if wanted.config_requirements is None:
        return []
    capabilities: AttentionCapabilities = backend.capabilities
    fitting = min(capabilities.head_sizes, default=1)
    return capabilities.refusals(replace(wanted.config_requirements, head_size=fitting))


def _probed(platform_cls: type[Any], verdict: Verdict) -> Verdict:
    """Return the verdict that a platform's own probe gives."""
    whose = f"platform {verdict.name!r}"
    try:
        probe = check_probe(whose, platform_cls.probe())
    except KeyboardInterrupt:
        raise
    except PluginError as error:
        return replace(verdict, state=FAILED, reasons=(str(error),), unclear=True)
    except BaseException as error:
        reasons = (str(probe_failure(whose, error)),)
        return replace(verdict, state=FAILED, reasons=reasons, unclear=True)
    state = ABLE if probe.usable else REFUSED
    return replace(verdict, state=state, reasons=tuple(probe.reasons))


def _others(
    registry: PluginRegistry, kind: str, told: Sequence[Verdict], otherwise: str
) -> list[Verdict]:
    """Return verdicts on those that do not take part. otherwise: why, where no rule forbids it."""
    known = {(verdict.name, verdict.distribution) for verdict in told}
    return [
        replace(Verdict.of(one), reasons=(_absence(registry, one) or otherwise or _outside(one),))
        for one in registry.candidates(kind)
        if (one.name, one.distribution) not in known
    ]


def _asked_in_vain(verdicts: Sequence[Verdict], references: Sequence[object]) -> list[Verdict]:
    """Return `verdicts`, with those marked that failing references may have meant."""
    text = "it is asked for, but cannot be taken: the error says why"
    return [
        replace(verdict, state=REFUSED, reasons=(text,))
        if {verdict.name, f"{verdict.name}@{verdict.distribution}"}.intersection(references)
        else verdict
        for verdict in verdicts
    ]


def _absence(registry: PluginRegistry, candidate: Candidate) -> str:
    """Return what keeps a candidate out whatever is asked for; "" if nothing does."""
    kind, name = candidate.kind, candidate.name
    rule = registry.policy.denial(
        kind, name, candidate.distribution, first_party=candidate.first_party
    )
    if rule:
        return f"denied by {rule}"
    whose = f"{kind}:{name}@{normalize_distribution(candidate.distribution)}"
    for other in registry.candidates(kind):
        if registry.policy.consents(kind, other.name, other.distribution) and whose in _replaced(
            registry, other
        ):
            return f"replaced by {other.reference}, as plugins_allow lets it"
    return ""


def _replaced(registry: PluginRegistry, candidate: Candidate) -> set[str]:
    """Return whom a candidate says that it replaces."""
    try:
        replaces = registry.describe(candidate.kind, candidate.reference).entry.replaces
    except PluginError:
        return set()  # its broken manifest is told of elsewhere
    parts = [text.rpartition("@") for text in replaces]
    return {f"{whom}@{normalize_distribution(owner)}" for whom, _, owner in parts}


def _outside(candidate: Candidate) -> str:
    return (
        "an outside plugin: ask for it by name, or allow it with "
        f"plugins_allow={candidate.kind}:{candidate.reference}"
    )
