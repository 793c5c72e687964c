"""Rejects policies that no run can load, before the first run and without importing them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from dovetail.errors import PluginError, PluginNotFoundError
from dovetail.plugins import PluginPolicy, PluginRegistry


def check_policies(references: Iterable[str], *, trust_local_code: bool) -> None:
    """Raise an error for the first policy that is not installed, not trusted or has no file.

    Classes are imported only in worker processes, so a missing class is an error of its runs.
    Raises PluginNotFoundError for an unknown name, and PluginError for a file that does not exist
    or that the user does not trust.
    """
    registry = PluginRegistry(policy=PluginPolicy(trust_local_code=trust_local_code))
    for reference in references:
        if ":" in reference:
            _check_class(registry, reference)
        else:
            _check_name(registry, reference)


def _check_class(registry: PluginRegistry, reference: str) -> None:
    file = Path(registry.resolve("policy", reference).target.rpartition(":")[0])
    if file.suffix == ".py" and not file.is_file():
        raise PluginError(f"Cannot load plugin {reference!r}: the file {str(file)!r} is missing.")


def _check_name(registry: PluginRegistry, reference: str) -> None:
    try:
        registry.describe("scheduler", reference)
    except PluginNotFoundError as rejection:
        try:
            registry.describe("policy", reference)
        except PluginNotFoundError:
            raise rejection from None
