"""Measures one format of one engine: reads a job, computes all logits, writes the metrics.

    PYTHON -m quality.job JOB.json RESULT.json

A job has the keys engine, model, options, threads, chunks ({text: [token ids, …]}), references
({name: directory}) and save_to (a directory or null); or, for metrics of each position, the key
positions instead of the last two. An engine is a module `quality.engine_<name>`
with a function `run(job, recorder)` that returns additional data, such as versions.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quality.metrics import Recorder
from quality.positions import PositionRecorder

BENCH = Path(__file__).resolve().parents[1]


class JobError(Exception):
    """An engine failed, exceeded its time limit or is not usable."""


def run_job(job: Mapping[str, Any]) -> dict[str, Any]:
    """Run a job in this process. Return the metrics by text, and information on the engine."""
    recorder = (
        PositionRecorder() if job.get("positions") else Recorder(job["references"], job["save_to"])
    )
    engine = importlib.import_module(f"quality.engine_{job['engine']}")
    info: dict[str, Any] = engine.run(job, recorder)
    return {"texts": recorder.result(), **info}


def run_separately(python: str, job: Mapping[str, Any], deadline_s: float) -> dict[str, Any]:
    """Run a job in a separate process. If it fails, raises JobError with its last output."""
    with tempfile.TemporaryDirectory() as folder:
        request, response = Path(folder, "job.json"), Path(folder, "result.json")
        request.write_text(json.dumps(job), encoding="utf-8")
        run_tool([python, "-m", "quality.job", str(request), str(response)], deadline_s)
        result: dict[str, Any] = json.loads(response.read_text("utf-8"))
        return result


def run_tool(command: list[str], deadline_s: float) -> None:
    """Run a command in the directory of the benchmarks.

    Raises JobError if it fails or exceeds its time limit.
    """
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    try:
        done = subprocess.run(
            command, cwd=BENCH, env=env, capture_output=True, text=True, timeout=deadline_s
        )
    except subprocess.TimeoutExpired:
        raise JobError(f"no result after {deadline_s:.0f} s") from None
    except OSError as error:
        raise JobError(str(error)) from None
    if done.returncode:
        output = " ".join((done.stderr or done.stdout).split())[-400:]
        raise JobError(f"{_ending(done.returncode)}: {output or 'no output'}")


def _ending(code: int) -> str:
    """Describe the exit code of a process. A negative code is the number of a signal."""
    if code >= 0:
        return f"exit code {code}"
    names = {item.value: item.name for item in signal.Signals}
    return f"ended by {names.get(-code, f'signal {-code}')}"


def main() -> None:
    """Run the job given on the command line."""
    job = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    Path(sys.argv[2]).write_text(json.dumps(run_job(job)), encoding="utf-8")


if __name__ == "__main__":
    main()
