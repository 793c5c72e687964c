"""Choosing: the winner of `judge` for each place of an engine.

A named plugin that cannot be used raises; an automatic candidate that fails is set aside with a
warning; there is no silent fallback.
"""

from __future__ import annotations

from typing import Any

from dovetail.errors import PluginNotFoundError
from dovetail.interfaces.attention import AttentionBackend, AttentionRequirements
from dovetail.interfaces.platform import Platform
from dovetail.plugins.construction import construct
from dovetail.plugins.registry import PluginRegistry
from dovetail.plugins.selection.judging import judge, no_winner
from dovetail.plugins.selection.precedence import resolve_scheduler
from dovetail.plugins.selection.verdict import FAILED, TAKEN, Criteria, Verdict


def select(registry: PluginRegistry, kind: str, criteria: Criteria) -> Verdict:
    """Return the verdict on the plugin that serves; it has a class.

    Raises PluginNotFoundError, with every reason, if automatic selection finds none, and what a
    named plugin or `plugins_strict` raises.
    """
    seen: list[Verdict] = []
    for verdict in judge(registry, kind, criteria):
        if verdict.is_fatal and verdict.error is not None:
            raise verdict.error
        if verdict.state == FAILED and verdict.error is not None:
            registry.put_aside(f"{kind} {verdict.reference}", verdict.error)
        if verdict.state == TAKEN:
            registry.note_choice(kind, verdict.cls)
            registry.check_options_used({kind: (verdict.reference,)})
            return verdict
        seen.append(verdict)
    raise PluginNotFoundError(no_winner(kind, criteria, seen))


def choose_platform(registry: PluginRegistry, reference: str | type) -> Platform:
    """Return the platform that was named, or the best one that can be used here.

    In automatic selection the highest rank wins, its manifest's or else its class's; then
    first-party before outside, then by distribution and name. From here on `registry` compares
    plugins' needs with what the platform provides. A probe that raises is a PluginLoadError, not a
    reason to use another platform.
    """
    platform_cls = select(registry, "platform", Criteria(references=(reference,))).cls
    assert platform_cls is not None
    options = registry.options_of("platform", platform_cls)
    platform: Platform = construct("platform", platform_cls, options=options)
    registry.bind_platform(platform)
    return platform


def choose(
    registry: PluginRegistry, platform: Platform, kind: str, reference: str | type
) -> type[Any]:
    """Return the class of a plugin for `platform`: the named one, or that of automatic selection.

    Raises as `select`.
    """
    cls = select(registry, kind, Criteria(references=(reference,), platform=platform)).cls
    assert cls is not None
    return cls


def choose_attention(
    registry: PluginRegistry,
    platform: Platform,
    reference: str | type,
    required: AttentionRequirements,
) -> type[AttentionBackend]:
    """Return the backend that does what a model requires: the named one, or the first that can.

    Raises UnfitPluginError with every reason if the named one refuses, and as `select`.
    """
    criteria = Criteria(references=(reference,), platform=platform, requirements=required)
    cls = select(registry, "attention", criteria).cls
    assert cls is not None
    return cls


def choose_scheduler(
    registry: PluginRegistry, reference: str | type
) -> tuple[type[Any], type[Any] | None]:
    """Return (scheduler class, policy class or None); a policy means the core's own scheduler."""
    return resolve_scheduler(registry, reference)
