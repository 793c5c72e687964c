"""The rules that a candidate must meet before it can be selected, in order.

A rule checks one candidate and returns whether it is usable, with reasons. A rule that cannot be
evaluated raises PluginError. A class is loaded only after its needs are met and its probe succeeds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from dovetail.errors import ContractError, PluginError
from dovetail.interfaces.attention import (
    AttentionBackend,
    AttentionCapabilities,
    AttentionRequirements,
)
from dovetail.interfaces.platform import Platform, Probe
from dovetail.plugin_kinds import get_kind
from dovetail.plugins.admission import check_probe, probe_failure
from dovetail.plugins.capabilities import declared_ids
from dovetail.plugins.construction import call_plugin as ask_plugin
from dovetail.plugins.contracts.declared import (
    device_problem,
    dtype_problem,
    missing_promise,
    promises_equal_bits,
)
from dovetail.plugins.platform_results import check_info
from dovetail.plugins.registry import PluginRegistry
from dovetail.plugins.selection.verdict import NOT_TRIED, USABLE, Criteria, Verdict
from dovetail.value_checks import shorten


@dataclass(frozen=True)
class _Subject:
    """The input of a rule: one candidate and its requirements."""

    registry: PluginRegistry
    kind: str
    reference: str | type
    verdict: Verdict
    criteria: Criteria

    def load(self) -> type[Any]:
        """Return the candidate's class. The registry loads it once."""
        return self.registry.load(self.kind, self.reference)


def apply_rules(
    registry: PluginRegistry,
    kind: str,
    reference: str | type,
    verdict: Verdict,
    criteria: Criteria,
    *,
    automatic: bool = False,
) -> Verdict:
    """Apply the rules in order, up to the first that rejects the candidate. Return the verdict."""
    subject = _Subject(registry, kind, reference, verdict, criteria)
    notes: list[str] = []
    for rule, check in _RULES.items():
        if rule == "automatic" and not automatic:
            continue
        try:
            reason = check(subject)
        except PluginError as error:
            # If a platform's probe raises, it is unknown whether the platform is usable here.
            unclear = kind == "platform" and rule in _PROBES
            is_fatal = not automatic or unclear or registry.policy.strict
            return verdict.failed(rule, error, is_fatal=is_fatal)
        if not reason.usable:
            rejected = verdict.rejected(rule, *reason.reasons)
            return replace(rejected, state=NOT_TRIED) if rule == "automatic" else rejected
        notes += reason.reasons
    cls = subject.load()
    if kind == "platform":
        verdict = replace(verdict, rank=verdict.rank or cls.rank)
    promised = promises_equal_bits(kind, cls, criteria.dtype)
    if promised is False:
        notes.append(missing_promise(criteria.dtype))
    return replace(verdict, state=USABLE, reasons=tuple(notes), batch_invariant=promised, cls=cls)


def _unless(*reasons: str) -> Probe:
    return Probe(usable=not any(reasons), reasons=tuple(filter(None, reasons)))


def _needs(subject: _Subject) -> Probe:
    return _unless(subject.registry.unmet_needs(subject.kind, subject.reference))


def _manifest_probe(subject: _Subject) -> Probe:
    if not get_kind(subject.kind).is_probed:
        return Probe(usable=True)
    return subject.registry.probe(subject.kind, subject.reference)


def _contract(subject: _Subject) -> Probe:
    cls = subject.load()
    if subject.kind == "platform":
        check_info(cls)
    return Probe(usable=True)


def _waits_to_be_named(subject: _Subject) -> Probe:
    waits = subject.kind == "platform" and not subject.load().automatic
    return _unless("this platform is used only if it is requested" if waits else "")


def _device(subject: _Subject) -> Probe:
    platform = subject.criteria.platform
    device_type = "" if platform is None else platform.info.device_type
    return _unless(device_problem(subject.kind, subject.load(), device_type))


def _dtype(subject: _Subject) -> Probe:
    return _unless(dtype_problem(subject.kind, subject.load(), subject.criteria.dtype))


def _provides(subject: _Subject) -> Probe:
    required = subject.criteria.provides
    missing = required - declared_ids(subject.load(), "provides") if required else frozenset()
    return _unless(f"it does not provide {', '.join(sorted(missing))}" if missing else "")


def _requirements(subject: _Subject) -> Probe:
    """Compare the candidate with the requirements of the model, or of the configuration alone."""
    criteria = subject.criteria
    if subject.kind != "attention":
        return Probe(usable=True)
    backend: type[AttentionBackend] = subject.load()
    if criteria.requirements is not None:
        return _unless(*attention_refusals(backend, criteria.requirements))
    if criteria.config_requirements is None:
        return Probe(usable=True)
    capabilities: AttentionCapabilities = backend.capabilities
    fitting = min(capabilities.head_sizes, default=1)
    known = replace(criteria.config_requirements, head_size=fitting)
    return _unless(*capabilities.refusals(known))


def _class_probe(subject: _Subject) -> Probe:
    if subject.kind != "platform":
        return Probe(usable=True)
    cls: type[Platform] = subject.load()
    owner = f"platform {subject.verdict.name if subject.verdict.distribution else cls.info.name!r}"
    try:
        result: object = cls.probe()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise probe_failure(owner, error) from error
    return check_probe(owner, result)


_RULES: Mapping[str, Callable[[_Subject], Probe]] = MappingProxyType(
    {
        "needs": _needs,
        "probe": _manifest_probe,
        "contract": _contract,
        "automatic": _waits_to_be_named,
        "device": _device,
        "dtype": _dtype,
        "provides": _provides,
        "requirements": _requirements,
        "class_probe": _class_probe,
    }
)
"""All rules by name, in order. A rule that cannot be evaluated raises PluginError."""
_PROBES = ("probe", "class_probe")


def attention_refusals(
    backend: type[AttentionBackend], required: AttentionRequirements
) -> list[str]:
    """Return every reason why `backend` does not meet the requirements."""
    owner = f"attention backend {backend.name!r}"
    own: object = ask_plugin(owner, "refusals", lambda: backend.refusals(required))
    if not isinstance(own, (list, tuple)) or not all(isinstance(item, str) for item in own):
        raise ContractError(
            f"The {owner} returned {shorten(own)} from its method refusals; it must return a list "
            "of reasons."
        )
    return [*backend.capabilities.refusals(required), *own]
