"""`dovetail lab profile`: measure the step times of a model on this machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from dovetail.cli.plugins_table import print_line, print_table
from dovetail.clock import MonotonicClock
from dovetail.errors import UserError
from dovetail_lab.commands.experiment_options import print_warning
from dovetail_lab.experiments.spec import EngineSpec, PolicySpec, make_engine_spec
from dovetail_lab.step_times.calibration import Calibration

MAX_SECONDS = 3600.0
NOISY = 0.15
"""If repeated measurements differ by more than this value, the machine was busy."""

_MODEL_HELP = "A model directory or name, such as demo."
_OUT_HELP = "The calibration file to write; NAME.json without this option."
_SECONDS_HELP = (
    "Time for measuring, after the model is loaded; every step is measured at least twice."
)
_ENGINE_GROUP = Group("Engine", sort_key=1)


def _option(text: str) -> Parameter:
    return Parameter(group=_ENGINE_GROUP, help=text)


@dataclass(frozen=True, kw_only=True)
class EngineFlags:
    """The engine to measure. Experiments may use any smaller engine."""

    max_num_seqs: Annotated[int, _option("Rows.")] = 32
    max_num_batched_tokens: Annotated[int, _option("Maximum number of tokens in a step.")] = 256
    max_model_len: Annotated[int, _option("Maximum length of a request.")] = 512
    num_blocks: Annotated[int, _option("Blocks of the KV cache, of 16 tokens each.")] = 1025
    num_threads: Annotated[int, _option("CPU threads; 0 for the platform's choice.")] = 0


_DEFAULT_ENGINE = EngineFlags()


def profile_model(
    *,
    model: Annotated[str, Parameter(help=_MODEL_HELP)],
    out: Annotated[Path | None, Parameter(help=_OUT_HELP, show_default=False)] = None,
    seconds: Annotated[float, Parameter(help=_SECONDS_HELP)] = 120.0,
    engine: Annotated[EngineFlags, Parameter(name="*")] = _DEFAULT_ENGINE,
) -> int:
    """Measure how long steps of a model take on this machine, and write a calibration file."""
    if not 0 < seconds <= MAX_SECONDS:
        raise UserError(f"--seconds {seconds:g} must be positive and at most {MAX_SECONDS:g}.")
    spec: EngineSpec = make_engine_spec({"model": model, **asdict(engine)})
    from dovetail_lab.step_times.profiling import profile  # starts a real engine

    calibration = profile(
        model,
        spec.setup(PolicySpec(policy="fcfs"), 0, trust_local_code=False),
        MonotonicClock(),
        seconds=seconds,
        num_threads=engine.num_threads,
        on_progress=_print_progress,
    )
    path = out or Path(f"{calibration.model.name.replace('/', '--')}.json")
    calibration.write(path)
    print_calibration(calibration)
    print_line(f"Wrote {path}. Use it with: dovetail lab compare --step-times {path}")
    return 0


def print_calibration(calibration: Calibration) -> None:
    """Print the terms of a calibration and the errors of its fit."""
    rows = [
        (f"per {name.replace('_', ' ')}", f"{value / 1e6:,.3f}")
        for name, value in calibration.step_ps.items()
    ]
    after_others, after_prompts = calibration.batch_change_ps
    constant, per_run = calibration.gap_ps
    rows += [
        ("first decode after other requests", f"{after_others / 1e6:,.3f}"),
        ("first decode after a prefill", f"{after_prompts / 1e6:,.3f}"),
        ("gap after a step", f"{constant / 1e6:,.3f}"),
        ("gap per run", f"{per_run / 1e6:,.3f}"),
    ]
    print_table(
        ("term", "µs"), rows, title=f"{calibration.model.name} on {calibration.machine.describe()}"
    )
    quality = calibration.quality
    print_line(
        f"{quality.num_steps:,} steps: bias {quality.bias:+.2%}, mean absolute error "
        f"{quality.mape:.1%}; between two measurements of the same steps {quality.repeat_mape:.1%}."
    )
    if quality.repeat_mape > NOISY:
        print_warning(
            "Repeated measurements differ much. Stop other work on this machine and measure again."
        )


def _print_progress(passes: int, num_steps: int, seconds: float) -> None:
    print_line(f"{passes} passes, {num_steps:,} steps, {seconds:.0f} s")
