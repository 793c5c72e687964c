"""Checks whether the machine's accelerators can be used by an installed platform.

This module compares the devices that vendor tools report with the probe results of platforms. This
module does not access devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version

from dovetail.plugins.capabilities import DEVICE_PREFIX
from dovetail.plugins.metadata.discovery import Candidate
from dovetail.plugins.registry import PluginRegistry
from dovetail_devkit.doctor.finding import NOTE, WARNING, Finding
from dovetail_devkit.doctor.trial_run import Trial

_CPU = "device.cpu"


def check_devices(
    devices: Sequence[tuple[str, str]], trials: Sequence[Trial], registry: PluginRegistry
) -> Iterator[Finding]:
    """Yield findings if no platform can use the machine's accelerators.

    devices: (tool, line), as `dovetail.machine.find_devices` returns them.
    """
    if not devices:
        return
    platforms = [trial for trial in trials if _is_for_accelerators(trial, registry)]
    if any(not trial.error and not trial.refusals for trial in platforms):
        return
    yield _unused(platforms)
    torch_version = _torch_version()
    if torch_version.endswith("+cpu"):
        yield Finding(
            area="environment",
            subject="torch",
            verdict=WARNING,
            text=f"torch {torch_version} is a CPU-only build, but this machine has an accelerator",
            remedy="install the build of torch for this accelerator",
        )


def verified_findings(plugins: Sequence[Candidate], registry: PluginRegistry) -> Iterator[Finding]:
    """Yield a note for each plugin with a `verified` entry in its manifest."""
    for plugin in plugins:
        if verified := registry.entry_of(plugin).verified:
            subject = f"{plugin.kind}:{plugin.reference}"
            text = f"verified: {verified}"
            yield Finding(area="plugins", subject=subject, verdict=NOTE, text=text)


def _is_for_accelerators(trial: Trial, registry: PluginRegistry) -> bool:
    provided = registry.entry_of(trial.plugin).provides
    is_device = any(item.startswith(DEVICE_PREFIX) and item != _CPU for item in provided)
    return trial.plugin.kind == "platform" and is_device


def _unused(platforms: Sequence[Trial]) -> Finding:
    reasons = [
        f"{trial.plugin.name}: {trial.error or '; '.join(trial.refusals)}" for trial in platforms
    ]
    text = "no installed platform supports accelerators"
    remedy = "install the platform of this device, such as: pip install 'dovetail[cuda]'"
    if reasons:
        text = f"no installed platform can use this device: {' | '.join(reasons)}"
        remedy = "fix this cause; until then, models run on the CPU"
    return Finding(area="machine", subject="device", verdict=WARNING, text=text, remedy=remedy)


def _torch_version() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""
