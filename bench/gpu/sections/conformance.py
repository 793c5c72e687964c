"""Runs the conformance kit for every plugin of the device: `pytest --dovetail-plugin`.

Attention backends and operations are compared with float64 references, in every declared dtype.
Each plugin has a separate pytest process; attention has one for each dtype. Several processes run
in parallel, because no times are measured and compiling kernels takes most of the time.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import mkdtemp

from dovetail.machine import read_cores
from dovetail.plugins import PluginRegistry
from gpu.device_parts import STAND_INS
from gpu.processes import Ended, python_path, run_until
from gpu.report import Report, Task
from gpu.tables import is_sound

_REST_S = 5.0
"""Time that remains for the report after the kits are killed."""
_MAX_AT_ONCE = 8
_PARTS = {
    "attention": (
        "float32",
        "bfloat16",
        "float16 and not bfloat16",
        "not float32 and not bfloat16 and not float16",
    ),
}
"""Parts of a kind's suite, as values of pytest's -k. Together the parts contain all tests."""
_WELL = (0, 5, None)
"""Accepted exit codes of a part: all passed, no cases, killed at its deadline."""
_COUNT = re.compile(r"(\d+) (passed|failed|error|skipped)")


def run(task: Task, report: Report) -> None:
    """Run the kit on each plugin and report the counts."""
    registry = PluginRegistry()
    installed = []
    for plugin in task.parts.plugins:
        kind, _, name = plugin.partition(":")
        if ":" in name or name in {candidate.name for candidate in registry.candidates(kind)}:
            installed.append(plugin)
        else:
            report.note(f"{plugin} is not installed")
    runs = [
        (plugin, part)
        for plugin in installed
        for part in _PARTS.get(plugin.partition(":")[0], ("",))
    ]
    at_once = max(1, min(_MAX_AT_ONCE, read_cores().usable // 2))
    with ThreadPoolExecutor(at_once) as pool:
        ended = list(pool.map(lambda item: _run_kit(*item, task), runs))
    for plugin in installed:
        results = [how for (owner, _), how in zip(runs, ended, strict=True) if owner == plugin]
        _report(plugin, results, report, _limit_s(task))


def _limit_s(task: Task) -> float:
    return max(task.deadline_s - _REST_S, 1.0)


def _run_kit(plugin: str, part: str, task: Task) -> Ended:
    folder = Path(mkdtemp(dir=task.folder))
    (folder / "empty").mkdir()
    arguments = ["-q", "-rfE", "--tb=short", "-p", "no:cacheprovider"]
    # Pytest plugins of other packages are disabled; the devkit's plugin is named.
    arguments += ["-p", "dovetail_devkit.pytest_plugin", "--rootdir", str(folder / "empty")]
    device = task.device if task.device in STAND_INS else task.parts.device_type
    arguments += ["--dovetail-plugin", plugin, "--dovetail-device", device, "-k", part]
    return run_until(
        [sys.executable, "-m", "pytest", *arguments],
        environment=python_path() | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        folder=folder,
        deadline_s=_limit_s(task),
        num_lines=2000,
        apart=False,
    )


def _report(plugin: str, runs: list[Ended], report: Report, limit_s: float) -> None:
    """Report a plugin's counts over all parts of its suite, and the failures."""
    counts: Counter[str] = Counter()
    for run in runs:
        counts.update(read_counts(plugin, run.output))
    report.plugin(plugin, counts)
    lines = [line for run in runs for line in run.output.splitlines()]
    for line in lines:
        if re.match(r"\s+\d+ skipped: ", line):
            report.note(f"{plugin}: {line.strip()}")
    if any(run.code is None for run in runs):
        report.fail(f"{plugin}: its suite did not finish within {limit_s:.0f} s")
    if not is_sound(counts) or any(run.code not in _WELL for run in runs):
        failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))] or lines[-8:]
        report.fail(f"{plugin}: {' | '.join(failures[:12])}")


def read_counts(plugin: str, output: str) -> dict[str, int]:
    """Return the counts in the kit's output line about a plugin, or {} if it is missing."""
    line = next(
        (splitline for splitline in output.splitlines() if splitline.startswith(f"{plugin}: ")), ""
    )
    return {what: int(count) for count, what in _COUNT.findall(line)}
