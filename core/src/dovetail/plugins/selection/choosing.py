"""Selects the plugin of each kind that an engine uses, from the verdicts of `evaluate`.

A requested plugin that cannot be used raises an error. An automatic candidate that fails is skipped
with a warning. There is no silent fallback.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dovetail.errors import DovetailError, PluginNotFoundError
from dovetail.interfaces.attention import AttentionBackend, AttentionRequirements
from dovetail.interfaces.platform import Platform
from dovetail.plugins.construction import call_plugin_within, construct
from dovetail.plugins.registry import PluginRegistry
from dovetail.plugins.selection.evaluation import evaluate, no_winner
from dovetail.plugins.selection.precedence import resolve_scheduler
from dovetail.plugins.selection.verdict import AUTO, FAILED, SELECTED, Criteria, Verdict

if TYPE_CHECKING:
    from dovetail.interfaces.requested_config import RequestedConfig

PREPARATION_TIMEOUT_S = 30.0
"""The engine waits at most this time for `Platform.prepare`, which should return immediately."""


def select(registry: PluginRegistry, kind: str, criteria: Criteria) -> Verdict:
    """Return the verdict on the selected plugin, including its class.

    Raises PluginNotFoundError, with every reason, if automatic selection finds no plugin. If a
    requested plugin fails, or with `plugins_strict` any candidate, its error is raised.
    """
    verdict = _first_taken(registry, kind, criteria)
    registry.note_choice(kind, verdict.cls)
    registry.check_options_used({kind: (verdict.reference,)})
    return verdict


def _first_taken(registry: PluginRegistry, kind: str, criteria: Criteria) -> Verdict:
    verdicts: list[Verdict] = []
    for verdict in evaluate(registry, kind, criteria):
        if verdict.is_fatal and verdict.error is not None:
            raise verdict.error
        if verdict.state == FAILED and verdict.error is not None:
            registry.put_aside(f"{kind} {verdict.reference}", verdict.error)
        if verdict.state == SELECTED:
            return verdict
        verdicts.append(verdict)
    raise PluginNotFoundError(no_winner(kind, criteria, verdicts))


def choose_platform(registry: PluginRegistry, reference: str | type) -> Platform:
    """Return the requested platform, or the best one that can be used on this machine.

    Automatic selection orders platforms by the rank in the manifest or class, highest first, then
    first-party ones first, then by distribution and name. Afterwards `registry` compares the needs
    of plugins with the capabilities of the platform. A probe that raises an exception causes a
    PluginLoadError; no other platform is tried.
    """
    platform_cls = select(registry, "platform", Criteria(references=(reference,))).cls
    assert platform_cls is not None
    options = registry.options_of("platform", platform_cls)
    platform: Platform = construct("platform", platform_cls, options=options)
    registry.bind_platform(platform)
    return platform


def prepare_platform(registry: PluginRegistry, config: RequestedConfig) -> Platform:
    """Return the platform of the engine, which prepares for the start of its worker.

    The first call chooses the platform and calls its `prepare`; later calls return it. A warning is
    logged if `prepare` fails or does not return within `PREPARATION_TIMEOUT_S`. Raises the errors
    of `choose_platform`.
    """
    if registry.platform is not None:
        return registry.platform
    platform = choose_platform(registry, config.parallel.platform)
    owner = f"platform {platform.info.name!r}"
    try:
        call_plugin_within(
            owner, "preparation", lambda: platform.prepare(config), timeout_s=PREPARATION_TIMEOUT_S
        )
    except DovetailError as error:
        registry.warn(f"{error} The engine starts without it.")
    return platform


def choose(
    registry: PluginRegistry,
    platform: Platform,
    kind: str,
    reference: str | type,
    *,
    dtype: str = "",
) -> type[Any]:
    """Return the class of the requested or automatically selected plugin for `platform`.

    dtype: the name of the model's dtype; "" if it does not matter. Raises the errors of `select`.
    """
    criteria = Criteria(references=(reference,), platform=platform, dtype=dtype)
    cls = select(registry, kind, criteria).cls
    assert cls is not None
    return cls


def choose_inner(registry: PluginRegistry, platform: Platform, kind: str) -> type[Any]:
    """Return the class that automatic selection chooses, for a plugin that uses another one.

    This does not change which plugin of the kind the engine itself uses. Raises the
    PluginNotFoundError of `select`.
    """
    cls = _first_taken(registry, kind, Criteria(references=(AUTO,), platform=platform)).cls
    assert cls is not None
    return cls


def choose_attention(
    registry: PluginRegistry,
    platform: Platform,
    reference: str | type,
    required: AttentionRequirements,
) -> type[AttentionBackend]:
    """Return the requested backend, or the first one that meets the model's requirements.

    Raises UnfitPluginError with every reason if the requested backend does not meet them, and the
    errors of `select`.
    """
    criteria = Criteria(references=(reference,), platform=platform, requirements=required)
    cls = select(registry, "attention", criteria).cls
    assert cls is not None
    return cls


def choose_scheduler(
    registry: PluginRegistry, reference: str | type
) -> tuple[type[Any], type[Any] | None]:
    """Return (scheduler class, policy class or None). The core's scheduler runs the policy."""
    return resolve_scheduler(registry, reference)
