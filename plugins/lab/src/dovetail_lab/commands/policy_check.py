"""Rejects policies that no run can load, before the first run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from dovetail.errors import ConfigError, PluginError, PluginNotFoundError
from dovetail.plugins import PluginPolicy, PluginRegistry
from dovetail.plugins.selection import choose_scheduler
from dovetail_lab.experiments.spec import PolicySpec


def check_policies(policies: Iterable[PolicySpec], *, trust_local_code: bool) -> None:
    """Raise an error for the first policy that is not installed, not trusted or has no file.

    The options of installed policies are checked, too. Classes are imported only in worker
    processes, so a missing class or a wrong option of a class is an error of its runs.
    Raises PluginNotFoundError for an unknown name, ConfigError for a wrong option, and PluginError
    for a file that does not exist or that the user does not trust.
    """
    rules = PluginPolicy(trust_local_code=trust_local_code)
    registry = PluginRegistry(policy=rules)
    for policy in policies:
        if ":" in policy.policy:
            _check_class(registry, policy.policy)
            continue
        _check_name(registry, policy.policy)
        if policy.options:
            options = {policy.policy: policy.options}
            choose_scheduler(PluginRegistry(policy=rules, options=options), policy.policy)


def check_candidates(candidates: Sequence[PolicySpec], *, trust_local_code: bool) -> None:
    """Raise the error of the first candidate of a search if none of them can be run.

    Candidates with a wrong option beside valid ones fail in their own runs.
    """
    errors = []
    for candidate in candidates:
        try:
            check_policies((candidate,), trust_local_code=trust_local_code)
        except ConfigError as error:
            errors.append(error)
    if errors and len(errors) == len(candidates):
        raise errors[0]


def _check_class(registry: PluginRegistry, reference: str) -> None:
    file = Path(registry.resolve("policy", reference).target.rpartition(":")[0])
    if file.suffix == ".py" and not os.path.isfile(file):
        raise PluginError(f"Cannot load plugin {reference!r}: the file {str(file)!r} is missing.")


def _check_name(registry: PluginRegistry, reference: str) -> None:
    try:
        registry.describe("scheduler", reference)
    except PluginNotFoundError as rejection:
        try:
            registry.describe("policy", reference)
        except PluginNotFoundError:
            raise rejection from None
