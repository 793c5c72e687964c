"""Devices and the platforms that are there for them: whether somebody uses what is here.

Holds what vendors' tools report against how the trials of platforms went. Asks no device anything.
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


def judge_devices(
    devices: Sequence[tuple[str, str]], trials: Sequence[Trial], registry: PluginRegistry
) -> Iterator[Finding]:
    """Yield what keeps the machine's accelerators from being used; nothing where they are.

    devices: (tool, line), as `dovetail.machine.find_devices` returns them.
    """
    if not devices:
        return
    platforms = [trial for trial in trials if _is_for_accelerators(trial, registry)]
    if any(not trial.error and not trial.refusals for trial in platforms):
        return
    yield _unused(platforms)
    found = _torch_version()
    if found.endswith("+cpu"):
        yield Finding(
            area="environment",
            subject="torch",
            verdict=WARNING,
            text=f"{found} is a build for CPUs alone, and this machine has an accelerator",
            remedy="install the build of torch that is made for it",
        )


def verified_findings(plugins: Sequence[Candidate], registry: PluginRegistry) -> Iterator[Finding]:
    """Yield a note for each plugin whose manifest says where it was proven, or that it was not."""
    for plugin in plugins:
        if told := registry.entry_of(plugin).verified:
            subject = f"{plugin.kind}:{plugin.reference}"
            text = f"verified: {told}"
            yield Finding(area="plugins", subject=subject, verdict=NOTE, text=text)


def _is_for_accelerators(trial: Trial, registry: PluginRegistry) -> bool:
    provided = registry.entry_of(trial.plugin).provides
    is_device = any(one.startswith(DEVICE_PREFIX) and one != _CPU for one in provided)
    return trial.plugin.kind == "platform" and is_device


def _unused(platforms: Sequence[Trial]) -> Finding:
    reasons = [
        f"{trial.plugin.name}: {trial.error or '; '.join(trial.refusals)}" for trial in platforms
    ]
    text = "no installed platform is made for accelerators"
    remedy = "install the one for this device, such as: pip install 'dovetail[cuda]'"
    if reasons:
        text = f"no installed platform can use it: {' | '.join(reasons)}"
        remedy = "Fix the reported cause; until then models run on the CPU"
    return Finding(area="machine", subject="device", verdict=WARNING, text=text, remedy=remedy)


def _torch_version() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""
