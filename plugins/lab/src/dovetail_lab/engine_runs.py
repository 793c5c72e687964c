"""Runs a workload on the real engine, in this process and in real time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail_lab.real_engine.engine import RealEngine
from dovetail_lab.simulation.engine import RunLimits
from dovetail_lab.simulation.results import RunResult
from dovetail_lab.simulation.setup import EngineSetup
from dovetail_lab.workloads.workload import Workload


def run_real(
    workload: Workload,
    setup: EngineSetup,
    *,
    model: str,
    record_steps: bool = True,
    decision_log: Path | None = None,
    limits: RunLimits | None = None,
    engine_options: Mapping[str, Any] | None = None,
) -> RunResult:
    """Load a model, run the workload at its arrival times, and unload the model.

    The model computes every step; its tokens are replaced, so that each request has the output
    length of the workload. model: a model directory or name, such as "demo". engine_options:
    additional fields of `EngineArgs`. The other arguments are the same as for `simulate`. Raises
    DovetailError if the engine cannot be created. If the policy or a step fails, the result has an
    error.
    """
    with RealEngine(model, setup, engine_options) as engine:
        return engine.run(
            workload, setup, record_steps=record_steps, decision_log=decision_log, limits=limits
        )
