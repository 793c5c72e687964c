"""Runs the GPU check in tests: with sections that a test defines, or the whole command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpu.catalog import SectionSpec
from gpu.check import Check, CheckOptions

ROOT = Path(__file__).resolve().parents[2]
COMMAND = ROOT / "bench" / "gpu" / "check.py"

MACHINE = """
def run(task, report):
    report.fact("device", {"type": task.device, "name": "a device of tests"})
    report.fact("versions", {"Python": "3"})
"""


def run_command(
    *arguments: object, bundle: Path = ROOT / "no-bundle", timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(COMMAND), "--bundle", str(bundle), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def run_sections(folder: Path, sources: dict[str, str], **settings: Any) -> tuple[int, Any, Path]:
    """Write sections from `sources` and run them. Return the exit code, the run and its file.

    settings: options of the check, and "deadline_s" of each section.
    """
    deadline_s = settings.pop("deadline_s", 30.0)
    code = folder / "made_up_sections"
    code.mkdir()
    specs = []
    for name, source in {"machine": MACHINE, **sources}.items():
        (code / f"made_up_{name}.py").write_text(source)
        specs.append(
            SectionSpec(
                name=name,
                question="Does it work?",
                deadline_s=deadline_s,
                module=f"made_up_{name}",
            )
        )
    result = folder / "result.json"
    defaults = {"device": "cpu", "small": True, "total_s": 60.0, **settings}
    check = Check(
        CheckOptions(sections=tuple(specs), result=result, site=code, **defaults),
        folder / "scratch",
    )
    check.go()
    assert json.loads(result.read_text("utf-8")) == json.loads(json.dumps(check.run))
    return check.exit_code(), check.run, result
