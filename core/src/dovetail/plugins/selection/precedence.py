"""The order of automatic candidates, and the resolution of a scheduler or policy reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from dovetail.errors import ContractError, PluginError, PluginNotFoundError
from dovetail.plugins.contracts.checks import OtherContractError
from dovetail.plugins.loading import Origin, load_target
from dovetail.plugins.metadata.discovery import Candidate
from dovetail.plugins.metadata.first_party import normalize_distribution
from dovetail.plugins.registry import PluginRegistry
from dovetail.plugins.resolving.reference import NamedReference, parse_reference

CORE_SCHEDULER = "dovetail.scheduling:Scheduler"
"""The scheduler that runs a policy given as `scheduler_cls`."""


def automatic_order(
    registry: PluginRegistry, kind: str, preferred: Sequence[str], platform: str
) -> list[Candidate]:
    """Return the candidates of automatic selection for `kind`, in the order to try them.

    preferred: plugins that the platform named `platform` prefers. If none of them is installed, a
    warning is logged; for a worker, PluginNotFoundError is raised, because another worker would use
    another device.
    """
    order = registry.automatic(kind, preferred)
    if not preferred or any(_is_installed(registry, kind, name) for name in preferred):
        return order
    installed = ", ".join(candidate.reference for candidate in registry.candidates(kind)) or "none"
    text = (
        f"The platform {platform!r} prefers the {kind} {', '.join(map(repr, preferred))}, which "
        f"is not installed. Installed: {installed}."
    )
    if kind == "worker":
        raise PluginNotFoundError(f"{text} Install it, or choose another worker with worker_cls.")
    registry.warn(f"{text} Another {kind} is used.")
    return order


def resolve_scheduler(
    registry: PluginRegistry, reference: str | type
) -> tuple[type[Any], type[Any] | None]:
    """Return (scheduler class, policy class or None). `scheduler_cls` also accepts a policy.

    The core's scheduler runs a policy.
    """
    if not _is_known(registry, "scheduler", reference) and _is_known(registry, "policy", reference):
        return _core_scheduler(), registry.load("policy", reference)
    try:
        return registry.load("scheduler", reference), None
    except (ContractError, PluginNotFoundError) as rejection:
        try:
            return _core_scheduler(), registry.load("policy", reference)
        except PluginError as wrong:
            is_policy = isinstance(rejection, OtherContractError)
            if is_policy and not isinstance(wrong, OtherContractError):
                raise
            raise rejection from None


def _core_scheduler() -> type[Any]:
    # Loaded by name, because this package does not depend on implementations.
    return cast("type[Any]", load_target(CORE_SCHEDULER, Origin(reference=CORE_SCHEDULER)))


def _is_installed(registry: PluginRegistry, kind: str, reference: str) -> bool:
    parsed = parse_reference(reference)
    if not isinstance(parsed, NamedReference):
        return True
    owner = normalize_distribution(parsed.distribution)
    return any(
        candidate.name == parsed.name
        and owner in ("", normalize_distribution(candidate.distribution))
        for candidate in registry.candidates(kind)
    )


def _is_known(registry: PluginRegistry, kind: str, reference: str | type) -> bool:
    """Return whether `reference` refers to an existing plugin of `kind`.

    Raises the errors of `PluginRegistry.resolve` for other problems of the reference.
    """
    try:
        registry.resolve(kind, reference)
    except PluginNotFoundError:
        return False
    return True
