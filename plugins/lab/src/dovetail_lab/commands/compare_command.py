"""`dovetail lab compare`: runs policies on the same workloads, and reports the differences.

The exit code is 1 if a run failed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from dovetail.cli.plugins_table import print_line, print_table
from dovetail.cli.terminal import count_text
from dovetail.errors import UserError
from dovetail_lab.commands.experiment_options import (
    DEFAULT_OPTIONS,
    DEFAULT_RUN,
    EXPERIMENT_GROUP,
    RUN_GROUP,
    ExperimentOptions,
    RunFlags,
    progress_bar,
)
from dovetail_lab.commands.policy_check import check_policies
from dovetail_lab.experiments.experiment import RunOptions, run_experiment
from dovetail_lab.experiments.export import export_results
from dovetail_lab.experiments.results import Results
from dovetail_lab.experiments.spec import ExperimentSpec
from dovetail_lab.experiments.spec_file import read_spec
from dovetail_lab.output_errors import output_errors
from dovetail_lab.reports.tables import (
    TextTable,
    difference_table,
    policy_table,
    report_load,
    winner_table,
)

_FILE_HELP = "An experiment file, TOML, YAML or JSON. Flags replace its fields."
_POLICIES_HELP = "Policies, separated by commas; the first one is the baseline."
_REPORT_HELP = "Write report.html, charts and traces; needs matplotlib."


def compare(
    file: Annotated[Path | None, Parameter(help=_FILE_HELP)] = None,
    /,
    *,
    policies: Annotated[
        str | None, Parameter(help=_POLICIES_HELP, group=EXPERIMENT_GROUP, show_default=False)
    ] = None,
    experiment: Annotated[ExperimentOptions, Parameter(name="*")] = DEFAULT_OPTIONS,
    run: Annotated[RunFlags, Parameter(name="*")] = DEFAULT_RUN,
    report: Annotated[bool, Parameter(help=_REPORT_HELP, group=RUN_GROUP)] = True,
) -> int:
    """Compare scheduling policies on the same workloads, with paired statistics."""
    spec = experiment_spec(file, policies, experiment)
    check_policies(spec.policies, trust_local_code=run.trust_local_code)
    if report:
        _require_matplotlib()
    with progress_bar(spec.name) as show:
        results = run_experiment(
            spec,
            RunOptions(
                out=run.out,
                num_workers=run.num_workers,
                trust_local_code=run.trust_local_code,
                on_progress=show,
            ),
        )
    print_results(results)
    with output_errors("out", run.out):
        paths = export_results(results, run.out)
        if report and results.by_cell:
            from dovetail_lab.reports.report import write_report  # imports matplotlib

            paths.append(write_report(results, run.out).page)
    for path in paths:
        print_line(f"Wrote {path}")
    return 1 if results.failures else 0


def experiment_spec(
    file: Path | None, policies: str | None, experiment: ExperimentOptions
) -> ExperimentSpec:
    """Return the experiment of a file and flags; raise UserError if it is incomplete."""
    fields = dict(read_spec(file)) if file else {}
    if policies is not None:
        fields["policies"] = [name.strip() for name in policies.split(",") if name.strip()]
    if file and "name" not in fields:
        fields["name"] = file.stem
    # An unknown field, such as "policy", is reported with its name.
    if not fields.get("policies") and fields.keys() <= ExperimentSpec.model_fields.keys():
        raise UserError(
            "no policies are specified. Write --policies fcfs,vtc or name an experiment file."
        )
    return experiment.make_spec(fields)


def print_results(results: Results) -> None:
    """Print the tables of each engine, and list what was not measured."""
    total, failed = len(results.records), len(results.failures)
    print_line(
        f"{count_text(total, 'run')}, {results.num_reused:,} reused, {failed:,} failed. Load 1 is "
        f"{results.capacity:.4g} requests/s."
    )
    for record in results.failures[:3]:
        key = record.key
        print_line(f"{key.policy}, load {key.load:g}, seed {key.seed}: {record.error}", style="red")
    for engine in results.spec.engines:
        suffix = "" if len(results.spec.engines) == 1 else f" ({engine})"
        load = report_load(results.spec.loads)
        _print(policy_table(results, engine, load), suffix)
        if len(results.policies) > 1:
            _print(difference_table(results, engine, load), suffix)
        if len(results.policies) > 1:
            _print(winner_table(results, engine), suffix)
    num_censored = sum(record.num_censored for record in results.records)
    if num_censored:
        print_line(f"{num_censored:,} measured requests did not end; see the report.")


def _print(table: TextTable, suffix: str) -> None:
    shown = table.oriented()
    print_line("")
    print_table(shown.headings, shown.rows, title=shown.title + suffix)


def _require_matplotlib() -> None:
    """Raise UserError before the first run if matplotlib is not installed."""
    import importlib.util

    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(
            "the report needs matplotlib. Run: pip install 'dovetail-lab[report]', or use "
            "--no-report."
        )
