"""Who fills a place: the user's pick, else the first that may be taken unasked and can be used.

The policy of choosing, apart from the mechanism of loading (`registry`). An explicit pick that
cannot be used raises; an automatic candidate that fails is set aside; nothing falls back in
silence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dovetail.errors import ContractError, PluginError, PluginNotFoundError, UnfitPluginError
from dovetail.interfaces.attention import AttentionBackend, AttentionRequirements
from dovetail.interfaces.platform import Platform, Probe
from dovetail.plugins.admission import check_probe, probe_failure
from dovetail.plugins.construction import call_plugin as ask_plugin
from dovetail.plugins.construction import construct
from dovetail.plugins.contract import OtherContractError
from dovetail.plugins.device_fit import device_refusal
from dovetail.plugins.discovery import Candidate
from dovetail.plugins.first_party import normalize_distribution
from dovetail.plugins.platform_answers import check_info, preferred_names
from dovetail.plugins.reference import NamedReference, parse_reference
from dovetail.plugins.registry import PluginRegistry
from dovetail.value_checks import shorten

AUTO = "auto"


def choose_platform(registry: PluginRegistry, reference: str | type) -> Platform:
    """Return the platform that was asked for, or the best one that can be used here.

    Of those that may be taken unasked the highest rank wins, its manifest's or else its class's;
    then first-party before outside, then by distribution and name. From here on `registry` holds
    plugins' needs against what the platform provides. A probe that raises is a PluginLoadError,
    not a reason to take another platform.
    """
    platform_cls = _platform_class(registry, reference)
    options = registry.options_of("platform", platform_cls)
    platform: Platform = construct("platform", platform_cls, options=options)
    registry.bind_platform(platform)
    return platform


def _platform_class(registry: PluginRegistry, reference: str | type) -> type[Platform]:
    if reference != AUTO:
        return _explicit_platform(registry, reference)
    refused = []
    usable: list[tuple[int, type[Platform]]] = []
    candidates = registry.automatic("platform")
    for candidate in candidates:
        platform_cls, reason = _usable_platform(registry, candidate)
        if reason:
            refused.append(f"{candidate.name} ({reason})")
        elif platform_cls is not None:
            entry = registry.describe("platform", candidate.reference)
            usable.append((entry.entry.rank or platform_cls.rank, platform_cls))
    refused += [
        f"{one.name} (an outside plugin: pass platform={one.name!r} to take it, or allow it with "
        f"plugins_allow)"
        for one in registry.candidates("platform")
        if one not in candidates
    ]
    if not usable:
        found = ", ".join(refused) or "none is installed; try: pip install dovetail-cpu"
        raise PluginNotFoundError(f"No platform can be used here. Found: {found}.")
    return max(usable, key=lambda one: one[0])[1]


def _usable_platform(
    registry: PluginRegistry, candidate: Candidate
) -> tuple[type[Platform] | None, str]:
    """Return a platform that can be used, or (None, why not), or (None, "") if it stands back."""
    try:
        about = registry.describe("platform", candidate.reference)
    except PluginError as error:
        registry.put_aside(candidate, error)
        return None, str(error)
    # Not set aside: a probe that fails has not said that the machine is another.
    probe = registry.probe("platform", candidate.reference)
    if not probe.usable:
        return None, "; ".join(probe.reasons)
    try:
        platform_cls: type[Platform] = registry.load("platform", candidate.reference)
        check_info(platform_cls)
    except PluginError as error:
        registry.put_aside(candidate, error)
        return None, str(error)
    if not platform_cls.automatic:
        return None, ""
    probe = _probed(platform_cls, str(about))
    return (platform_cls, "") if probe.usable else (None, "; ".join(probe.reasons))


def _explicit_platform(registry: PluginRegistry, reference: str | type) -> type[Platform]:
    probe = registry.probe("platform", reference)
    name = str(reference)
    if probe.usable:
        platform_cls: type[Platform] = registry.load("platform", reference)
        name = check_info(platform_cls).name
        probe = _probed(platform_cls, f"platform {name!r}")
    if not probe.usable:
        raise PluginError(
            f"The platform {name!r} was asked for, but it cannot be used here: "
            f"{'; '.join(probe.reasons)}.{_alternatives(registry, 'platform')}"
        )
    return platform_cls


def _probed(platform_cls: type[Platform], whose: str) -> Probe:
    try:
        answer: object = platform_cls.probe()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise probe_failure(whose, error) from error
    return check_probe(whose, answer)


def choose(
    registry: PluginRegistry, platform: Platform, kind: str, reference: str | type
) -> type[Any]:
    """Return the class for `kind`: the user's pick, or the first automatic candidate that loads.

    Candidates that fail are set aside, visibly. Raises PluginNotFoundError, with every reason, if
    none is left.
    """
    device_type = platform.info.device_type
    if reference != AUTO:
        require_usable(registry, kind, reference, platform)
        picked = registry.load(kind, reference)
        if reason := device_refusal(kind, picked, device_type):
            raise PluginError(
                f"The {kind} {reference!r} was asked for on the platform {platform.info.name!r}, "
                f"but {reason}.{_alternatives(registry, kind, platform)}"
            )
        registry.note_choice(kind, picked)
        return picked
    refused = []
    preferred = preferred_names(platform, kind)
    for candidate in automatic_order(registry, kind, preferred, platform.info.name):
        found, reason = try_candidate(registry, candidate)
        if found is not None:
            reason = device_refusal(kind, found, device_type)
            if not reason:
                registry.note_choice(kind, found)
                return found
        refused.append(f"{candidate.name}: {reason}")
    names = sorted(candidate.name for candidate in registry.candidates(kind))
    raise PluginNotFoundError(
        f"No {kind} was asked for, and none can be taken unasked. The platform "
        f"{platform.info.name!r} prefers {', '.join(preferred) or 'none'}; installed: "
        f"{', '.join(names) or 'none'}. Name one, or allow an outside one with plugins_allow."
        + "".join(f"\n{line}" for line in refused)
    )


def automatic_order(
    registry: PluginRegistry, kind: str, preferred: Sequence[str], platform: str
) -> list[Candidate]:
    """Return the plugins of `kind` that may be taken unasked, in the order in which to try them.

    preferred: by the platform called `platform`. If none of them is installed, that is an error for
    a worker, since another platform's computes on another device, and else a warning.
    """
    order = registry.automatic(kind, preferred)
    if not preferred or any(_is_installed(registry, kind, name) for name in preferred):
        return order
    installed = ", ".join(one.reference for one in registry.candidates(kind)) or "none"
    text = (
        f"The platform {platform!r} prefers the {kind} {', '.join(map(repr, preferred))}, which "
        f"is not installed. Installed: {installed}."
    )
    if kind == "worker":
        raise PluginNotFoundError(f"{text} Install it, or choose another with worker_cls.")
    registry.warn(f"{text} Another one is taken.")
    return order


def _is_installed(registry: PluginRegistry, kind: str, reference: str) -> bool:
    asked = parse_reference(reference)
    if not isinstance(asked, NamedReference):
        return True
    owner = normalize_distribution(asked.distribution)
    return any(
        one.name == asked.name and owner in ("", normalize_distribution(one.distribution))
        for one in registry.candidates(kind)
    )


def require_usable(
    registry: PluginRegistry,
    kind: str,
    reference: str | type,
    platform: Platform,
    requirements: AttentionRequirements | None = None,
) -> None:
    """Raise PluginError if the probe of an explicit pick says that it cannot be used here."""
    probe = registry.probe(kind, reference)
    if not probe.usable:
        raise PluginError(
            f"The {kind} {reference!r} was asked for, but it cannot be used here: "
            f"{'; '.join(probe.reasons)}.{_alternatives(registry, kind, platform, requirements)}"
        )


def _alternatives(
    registry: PluginRegistry,
    kind: str,
    platform: Platform | None = None,
    requirements: AttentionRequirements | None = None,
) -> str:
    """Return a sentence that names what would do instead of a pick that does not; "" for none."""
    from dovetail.plugins.explanation import Wanted, alternatives  # needed only where one fails

    wanted = Wanted(references=(AUTO,), requirements=requirements)
    if platform is not None:
        info, preferred = platform.info, preferred_names(platform, kind)
        wanted = replace(
            wanted, platform=info.name, device_type=info.device_type, preferred=preferred
        )
    return alternatives(registry, kind, wanted)


def try_candidate(registry: PluginRegistry, candidate: Candidate) -> tuple[type[Any] | None, str]:
    """Return the class of an automatic candidate, or None and why it is not taken.

    One that needs another platform or whose probe says no is passed over; one that fails is set
    aside with a warning.
    """
    try:
        if unmet := registry.unmet_needs(candidate.kind, candidate.reference):
            return None, unmet
        probe = registry.probe(candidate.kind, candidate.reference)
        if not probe.usable:
            return None, "; ".join(probe.reasons)
        return registry.load(candidate.kind, candidate.reference), ""
    except PluginError as error:
        registry.put_aside(candidate, error)
        return None, str(error)


def choose_scheduler(
    registry: PluginRegistry, reference: str | type
) -> tuple[type[Any], type[Any] | None]:
    """Return (scheduler class, policy class or None): `scheduler_cls` takes a policy, too.

    A policy means the core's own mechanism in that order.
    """
    from dovetail.scheduling import Scheduler  # the core's own plugin, imported when chosen

    if not is_known(registry, "scheduler", reference) and is_known(registry, "policy", reference):
        return Scheduler, registry.load("policy", reference)
    try:
        return registry.load("scheduler", reference), None
    except (ContractError, PluginNotFoundError) as refusal:
        try:
            return Scheduler, registry.load("policy", reference)
        except PluginError as wrong:
            is_policy = isinstance(refusal, OtherContractError)
            if is_policy and not isinstance(wrong, OtherContractError):
                raise
            raise refusal from None


def is_known(registry: PluginRegistry, kind: str, reference: str | type) -> bool:
    """Return whether `reference` may mean a plugin of `kind`; raise as `resolve` for the rest."""
    try:
        registry.resolve(kind, reference)
    except PluginNotFoundError:
        return False
    return True


def choose_attention(
    registry: PluginRegistry,
    platform: Platform,
    reference: str | type,
    requirements: AttentionRequirements,
) -> type[AttentionBackend]:
    """Return the backend for what a model asks: the user's pick, else the first that is able.

    Raises UnfitPluginError with every reason if the pick refuses, PluginError if all candidates do.
    """
    if reference != AUTO:
        require_usable(registry, "attention", reference, platform, requirements)
        backend: type[AttentionBackend] = registry.load("attention", reference)
        if reasons := attention_refusals(backend, requirements):
            raise UnfitPluginError(
                f"attention_backend={backend.name!r}: the attention backend {backend.name!r} was "
                f"asked for, but: {'; '.join(reasons)}."
                f"{_alternatives(registry, 'attention', platform, requirements)}"
            )
        registry.note_choice("attention", backend)
        return backend
    refused = []
    preferred = preferred_names(platform, "attention")
    for candidate in automatic_order(registry, "attention", preferred, platform.info.name):
        found, reason = try_candidate(registry, candidate)
        reasons = [reason] if found is None else attention_refusals(found, requirements)
        if found is not None and not reasons:
            registry.note_choice("attention", found)
            return found
        refused.append(f"{candidate.name}: {'; '.join(reasons)}")
    names = "\n".join(refused) or "none is installed; try: pip install dovetail-attn-torch"
    raise PluginNotFoundError(f"No attention backend does what this model asks.\n{names}")


def attention_refusals(
    backend: type[AttentionBackend], requirements: AttentionRequirements
) -> list[str]:
    """Return every reason why `backend` cannot do what is asked."""
    whose = f"attention backend {backend.name!r}"
    own: object = ask_plugin(whose, "refusals", lambda: backend.refusals(requirements))
    if not isinstance(own, (list, tuple)) or not all(isinstance(one, str) for one in own):
        raise ContractError(
            f"The {whose} returned {shorten(own)} for refusals; it has to return a list of reasons."
        )
    return [*backend.capabilities.refusals(requirements), *own]
