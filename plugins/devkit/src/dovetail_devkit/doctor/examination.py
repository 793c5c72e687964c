"""Runs all checks of the doctor, in order."""

from __future__ import annotations

from collections.abc import Callable

from dovetail.machine import find_devices
from dovetail.plugins.registry import PluginRegistry
from dovetail.plugins.resolving.plugin_policy import PluginPolicy
from dovetail_devkit.doctor.devices import check_devices, verified_findings
from dovetail_devkit.doctor.finding import Finding
from dovetail_devkit.doctor.path_files import check_path_files
from dovetail_devkit.doctor.registrations import check_registrations, plugins_to_try
from dovetail_devkit.doctor.surroundings import check_environment, check_machine
from dovetail_devkit.doctor.trial_findings import check_trial
from dovetail_devkit.doctor.trial_run import try_plugins

DEADLINE_S = 60.0
AREAS = ("machine", "environment", "plugins")


def _ignore(text: str) -> None:
    """The default of `progress`: do nothing."""


def examine(
    *,
    deadline_s: float = DEADLINE_S,
    progress: Callable[[str], None] = _ignore,
    no_plugins: bool = False,
) -> list[Finding]:
    """Return all findings: machine, then environment, then plugins.

    deadline_s: how long one plugin may take to load. progress: called with the current check.
    no_plugins: load first-party plugins only.
    """
    progress("checking the machine")
    findings = [*check_machine(), *check_environment(), *check_path_files()]
    progress("reading plugin metadata")
    registry = PluginRegistry(policy=PluginPolicy(no_plugins=no_plugins))
    findings += check_registrations(registry)
    plugins = plugins_to_try(registry)
    findings += verified_findings(plugins, registry)
    progress(f"loading {len(plugins)} plugins in separate processes")
    trials = try_plugins(plugins, deadline_s=deadline_s)
    for trial in trials:
        findings += check_trial(trial)
    return sorted(
        [*findings, *check_devices(find_devices(), trials, registry)],
        key=lambda finding: AREAS.index(finding.area),
    )
