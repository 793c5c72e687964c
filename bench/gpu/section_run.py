"""Runs one section in a separate process: `python -m gpu.section_run TASK` (JSON).

Only `check.py` starts this program. The outcome is written next to the report, with the exception
or the missing package.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from pathlib import Path

from gpu.device_parts import prepare_device
from gpu.report import (
    BROKEN,
    FAILED,
    LACKS,
    NO_DEVICE,
    OK,
    NeedsDeviceError,
    Report,
    Task,
    describe_error,
)


def run_section(module: str, task: Task, report: Report) -> tuple[str, str]:
    """Run a section's module. Return its state and, unless it is "ok", the reason."""
    try:
        prepare_device(task.device)
        importlib.import_module(module).run(task, report)
    except NeedsDeviceError as reason:
        return NO_DEVICE, str(reason)
    except ModuleNotFoundError as error:
        return LACKS, f"{error.name} is not installed"
    except Exception as error:
        traceback.print_exc()
        return BROKEN, describe_error(error)
    return (FAILED, "; ".join(report.wrong)) if report.wrong else (OK, "")


def main() -> int:
    """Run the section that the argument names."""
    output = json.loads(sys.argv[1])
    folder = Path(output["folder"])
    task = Task(
        device=output["device"],
        small=output["small"],
        folder=folder,
        seed=output["seed"],
        deadline_s=output["deadline_s"],
    )
    report = Report(file=Path(output["report"]))
    state, why = run_section(output["module"], task, report)
    Path(output["ending"]).write_text(json.dumps({"state": state, "why": why}), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
