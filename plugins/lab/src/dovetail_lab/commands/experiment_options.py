"""The flags that describe an experiment; each replaces a field of the experiment file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from os import cpu_count
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter

from dovetail.cli.terminal import count_text
from dovetail.errors import UserError
from dovetail_lab.experiments.experiment import OnProgress
from dovetail_lab.experiments.run_files import RunRecord
from dovetail_lab.experiments.run_key import CAPACITY_LOAD
from dovetail_lab.experiments.spec import (
    ExperimentSpec,
    make_spec,
    parse_loads,
    workload_fields,
)

WORKLOAD_GROUP = Group("Workload", sort_key=1)
EXPERIMENT_GROUP = Group("Experiment", sort_key=2)
RUN_GROUP = Group("Running", sort_key=3)
MAX_JOBS = 1024


def _option(group: Group, text: str) -> Parameter:
    return Parameter(group=group, help=text, show_default=False, negative="")


@dataclass(frozen=True, kw_only=True)
class ExperimentOptions:
    """Flags that describe the experiment. None keeps the file's value, or the default."""

    trace: Annotated[
        str | None,
        _option(
            WORKLOAD_GROUP,
            "azure:conv, azure:code, mooncake:conversation, mooncake:synthetic, a file, or a "
            "synthetic workload such as chat, conversations, agents or hot_prefix.",
        ),
    ] = None
    requests: Annotated[int | None, _option(WORKLOAD_GROUP, "Requests per run (1000).")] = None
    tenants: Annotated[
        int | None, _option(WORKLOAD_GROUP, "Assign requests to this many tenants.")
    ] = None
    slo: Annotated[
        str | None, _option(WORKLOAD_GROUP, "Objectives in milliseconds, such as ttft:500,tpot:50.")
    ] = None
    expected_tokens: Annotated[
        str | None,
        _option(WORKLOAD_GROUP, "Estimates of output lengths: none, exact or noisy:SIGMA."),
    ] = None
    load: Annotated[
        str | None,
        _option(
            EXPERIMENT_GROUP, "Fractions of the capacity: 0.5,0.9 or FROM:TO:COUNT (0.5,0.7,0.9)."
        ),
    ] = None
    seeds: Annotated[
        int | None, _option(EXPERIMENT_GROUP, "Number of workloads per load (10).")
    ] = None
    engine: Annotated[str | None, _option(EXPERIMENT_GROUP, "sim, real or both (sim).")] = None
    step_times: Annotated[
        str | None,
        _option(
            EXPERIMENT_GROUP,
            "Step times of the simulator: linear, calibrated:NAME, a file of lab profile, or "
            "roofline:DEVICE (linear).",
        ),
    ] = None
    strict: Annotated[
        bool,
        _option(
            EXPERIMENT_GROUP,
            "Reject step times that are rough, or of another machine, model or commit.",
        ),
    ] = False
    replicas: Annotated[
        int | None, _option(EXPERIMENT_GROUP, "Engines behind a router, in the simulator (1).")
    ] = None
    router: Annotated[
        str | None,
        _option(EXPERIMENT_GROUP, "round_robin, least_load, session, prefix or a class."),
    ] = None
    prefill_replicas: Annotated[
        int | None,
        _option(EXPERIMENT_GROUP, "Replicas that only run prefill; the others decode (0)."),
    ] = None
    model: Annotated[
        str | None,
        _option(EXPERIMENT_GROUP, "Model of the real engine and of the step times (demo)."),
    ] = None
    time_limit: Annotated[float | None, _option(EXPERIMENT_GROUP, "Seconds per run (600).")] = None

    def make_spec(self, fields: Mapping[str, Any]) -> ExperimentSpec:
        """Return the experiment described by a file's fields and the flags.

        Warns if the step times may be inaccurate; with `strict`, raises UserError instead. Raises
        UserError for an invalid field.
        """
        applied = self.apply(fields)
        are_known = fields.keys() <= ExperimentSpec.model_fields.keys()
        if are_known and not fields.get("workload") and self.trace is None:
            raise UserError(
                "no workload is specified. Write --trace chat, or name a trace or an experiment "
                "file with a workload."
            )
        spec = make_spec(applied)
        if "sim" not in spec.engines:
            return spec
        reference = spec.setup.step_time_reference
        if spec.engine == "both":
            reference = replace(reference, model=spec.setup.real_model)
        reference.load()
        problems = reference.problems(spec.setup.limits, strict=self.strict)
        if problems and self.strict:
            raise UserError(f"{' '.join(problems)} Omit --strict to use it anyway.")
        for problem in problems:
            print_warning(problem)
        return spec

    def apply(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of an experiment file, overridden by the flags."""
        output = dict(fields)
        output["workload"] = self._workload(_table(output, "workload"))
        setup = {
            **_table(output, "setup"),
            **_set(
                {
                    "step_times": self.step_times,
                    "model": self.model,
                    "replicas": self.replicas,
                    "router": self.router,
                    "prefill_replicas": self.prefill_replicas,
                }
            ),
        }
        if setup:
            output["setup"] = setup
        output |= _set(
            {
                "loads": None if self.load is None else parse_loads(self.load),
                "seeds": self.seeds,
                "engine": self.engine,
                "time_limit_s": self.time_limit,
            }
        )
        return output

    def _workload(self, workload: dict[str, Any]) -> dict[str, Any]:
        if self.trace is not None:
            for name in ("trace", "synthetic", "mix", "sessions"):
                workload.pop(name, None)
            workload |= workload_fields(self.trace)
        return workload | _set(
            {
                "num_requests": self.requests,
                "tenants": self.tenants,
                "expected_tokens": self.expected_tokens,
                "slo_classes": None if self.slo is None else [_slo_class(self.slo)],
            }
        )


DEFAULT_OPTIONS = ExperimentOptions()


@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """Flags that do not change the results."""

    out: Annotated[
        Path, Parameter(group=RUN_GROUP, help="Directory of the results; finished runs are reused.")
    ] = Path("lab-results")
    jobs: Annotated[
        int | None, _option(RUN_GROUP, "Number of processes; one per core without this option.")
    ] = None
    trust_local_code: Annotated[
        bool, _option(RUN_GROUP, "Run policies that are given as ./file.py:Class.")
    ] = False

    @property
    def num_workers(self) -> int:
        """The number of processes."""
        if self.jobs is None:
            return cpu_count() or 1
        if not 1 <= self.jobs <= MAX_JOBS:
            raise UserError(f"--jobs {self.jobs} must be between 1 and {MAX_JOBS}.")
        return self.jobs


DEFAULT_RUN = RunFlags()


@contextmanager
def progress_bar(title: str) -> Iterator[OnProgress]:
    """Yield a function that reports progress on stderr: a bar on a terminal, else a few lines."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _line_printer(title, console.print)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[last]}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(title, total=None, last="")

        def show(done: int, total: int, record: RunRecord | None) -> None:
            progress.update(task, completed=done, total=total, last=run_text(record))

        yield show


def print_warning(text: str) -> None:
    """Print a warning to stderr."""
    from rich.console import Console

    console = Console(stderr=True)
    console.print(f"Warning: {text}", style="yellow", markup=False, highlight=False)


def run_text(record: RunRecord | None) -> str:
    """Return the name of a run for the progress display, with its error if it failed."""
    if record is None:
        return ""
    load = "capacity" if record.key.load == CAPACITY_LOAD else f"load {record.key.load:g}"
    name = f"{record.key.policy} {load} seed {record.key.seed}"
    return name if record.ok else f"{name} failed: {record.error[:120]}"


def _line_printer(title: str, write: Any) -> OnProgress:
    shown = [-1]

    def show(done: int, total: int, record: RunRecord | None) -> None:
        if record is not None and not record.ok:
            write(f"{title}: {run_text(record)}", markup=False, highlight=False, soft_wrap=True)
        tenth = 10 * done // max(1, total)
        if tenth != shown[0]:
            shown[0] = tenth
            write(f"{title}: {done} of {count_text(total, 'run')}", markup=False, highlight=False)

    return show


def _set(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the options that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def _table(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a copy of a table of an experiment file; an absent table is empty."""
    table = fields.get(name, {})
    if not isinstance(table, Mapping):
        raise UserError(f"the experiment is invalid: {name}: must be a table of fields.")
    return dict(table)


def one_load(spec: ExperimentSpec) -> ExperimentSpec:
    """Return the experiment. Raise UserError if it has more than one load."""
    if len(spec.loads) > 1:
        raise UserError(
            f"load={','.join(f'{load:g}' for load in spec.loads[:5])}: this command runs one load."
        )
    return spec


def _slo_class(text: str) -> dict[str, Any]:
    """Parse an SLO class such as "ttft:500,tpot:50"."""
    fields: dict[str, Any] = {"name": "default"}
    for part in text.split(","):
        name, _, number = part.partition(":")
        key = f"{name.strip()}_ms"
        try:
            if key not in ("ttft_ms", "tpot_ms") or not float(number) > 0:
                raise ValueError
        except ValueError as error:
            raise UserError(
                f"slo={text!r} is not of the form ttft:MILLISECONDS,tpot:MILLISECONDS with "
                "positive numbers."
            ) from error
        if key in fields:
            raise UserError(f"slo={text!r} contains {name.strip()} twice.")
        fields[key] = float(number)
    return fields
