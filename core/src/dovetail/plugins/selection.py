"""Who fills a place: the user's pick, else what the platform prefers, else the only one there is.

The policy of choosing, apart from the mechanism of loading (`registry`). An explicit pick that
cannot be used raises; nothing falls back in silence.
"""

from __future__ import annotations

from typing import Any

from dovetail.errors import ContractError, PluginError, PluginNotFoundError
from dovetail.interfaces.attention import AttentionAsk, AttentionBackend
from dovetail.interfaces.platform import Platform
from dovetail.plugins.discovery import is_first_party
from dovetail.plugins.registry import PluginRegistry

AUTO = "auto"


def choose_platform(registry: PluginRegistry, reference: str | type) -> Platform:
    """Return the platform that was asked for, or the best first-party one that can be used here.

    A probe that raises is an error, not a reason to take another platform.
    """
    if reference != AUTO:
        return _explicit_platform(registry.load("platform", reference))
    refused, usable = [], []
    for candidate in registry.candidates("platform"):
        if not is_first_party(candidate.distribution):
            refused.append(f"{candidate.name} (an outside plugin: pass platform='…' to take it)")
            continue
        platform_cls = registry.load("platform", f"{candidate.name}@{candidate.distribution}")
        probe = platform_cls.probe() if platform_cls.automatic else None
        if probe is not None and probe.usable:
            usable.append(platform_cls)
        elif probe is not None:
            refused.append(f"{candidate.name} ({'; '.join(probe.reasons)})")
    if not usable:
        found = ", ".join(refused) or "none is installed; try: pip install dovetail-cpu"
        raise PluginNotFoundError(f"No platform can be used here. Found: {found}.")
    best: Platform = max(usable, key=lambda platform_cls: platform_cls.rank)()
    return best


def _explicit_platform(platform_cls: type[Platform]) -> Platform:
    probe = platform_cls.probe()
    if not probe.usable:
        raise PluginError(
            f"The platform {platform_cls.info.name!r} was asked for, but it cannot be used here: "
            f"{'; '.join(probe.reasons)}."
        )
    return platform_cls()


def choose(
    registry: PluginRegistry, platform: Platform, kind: str, reference: str | type
) -> type[Any]:
    """Return the class for `kind`: the user's pick, the platform's preference, or the only one."""
    if reference != AUTO:
        return registry.load(kind, reference)
    candidates = registry.candidates(kind)
    installed = {candidate.name for candidate in candidates}
    for name in platform.prefer(kind):
        if name in installed:
            return registry.load(kind, name)
    if len(candidates) == 1:
        return registry.load(kind, f"{candidates[0].name}@{candidates[0].distribution}")
    raise PluginNotFoundError(
        f"No {kind} was asked for, and the platform {platform.info.name!r} prefers "
        f"{', '.join(platform.prefer(kind)) or 'none'} of those installed: "
        f"{', '.join(sorted(installed)) or 'none'}. Name one."
    )


def choose_scheduler(
    registry: PluginRegistry, reference: str | type
) -> tuple[type[Any], type[Any] | None]:
    """Return (scheduler class, policy class or None): `scheduler_cls` takes a policy, too.

    A policy means the core's own mechanism in that order.
    """
    from dovetail.scheduling import Scheduler  # the core's own plugin, imported when chosen

    names = {candidate.name for candidate in registry.candidates("scheduler")}
    policies = {candidate.name for candidate in registry.candidates("policy")}
    if isinstance(reference, str) and reference in policies - names:
        return Scheduler, registry.load("policy", reference)
    try:
        return registry.load("scheduler", reference), None
    except (ContractError, PluginNotFoundError) as refusal:
        try:
            return Scheduler, registry.load("policy", reference)
        except PluginError:
            raise refusal from None


def choose_attention(
    registry: PluginRegistry, platform: Platform, reference: str | type, ask: AttentionAsk
) -> type[AttentionBackend]:
    """Return the backend for what a model asks: the user's pick, else the first that is able.

    Raises PluginError with every reason if the pick, or all candidates, refuse.
    """
    if reference != AUTO:
        backend: type[AttentionBackend] = registry.load("attention", reference)
        if reasons := attention_refusals(backend, ask):
            raise PluginError(
                f"The attention backend {backend.name!r} was asked for, but: {'; '.join(reasons)}."
            )
        return backend
    refused = []
    for name in _attention_order(registry, platform):
        backend = registry.load("attention", name)
        reasons = attention_refusals(backend, ask)
        if not reasons:
            return backend
        refused.append(f"{name}: {'; '.join(reasons)}")
    found = "\n".join(refused) or "none is installed; try: pip install dovetail-attn-torch"
    raise PluginNotFoundError(f"No attention backend does what this model asks.\n{found}")


def attention_refusals(backend: type[AttentionBackend], ask: AttentionAsk) -> list[str]:
    """Return every reason why `backend` cannot do what is asked."""
    return [*backend.capabilities.refusals(ask), *backend.refusals(ask)]


def _attention_order(registry: PluginRegistry, platform: Platform) -> list[str]:
    candidates = registry.candidates("attention")
    installed = {candidate.name for candidate in candidates}
    preferred = [name for name in platform.prefer("attention") if name in installed]
    own = [c.name for c in candidates if is_first_party(c.distribution)]
    return [*preferred, *(name for name in own if name not in preferred)]
