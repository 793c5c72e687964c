"""`dovetail lab sweep`: find good options of a policy."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from dovetail.cli.plugins_table import print_line, print_table
from dovetail.cli.terminal import count_text
from dovetail.errors import UserError
from dovetail_lab.commands.experiment_options import (
    DEFAULT_OPTIONS,
    DEFAULT_RUN,
    ExperimentOptions,
    RunFlags,
    one_load,
    progress_bar,
)
from dovetail_lab.commands.policy_check import check_candidates, check_policies
from dovetail_lab.experiments.experiment import RunOptions
from dovetail_lab.experiments.export import export_results
from dovetail_lab.output_errors import output_errors
from dovetail_lab.reports.tables import number_text
from dovetail_lab.searches.sweep import candidates_of, parse_option, sweep

_OPTION_HELP = "An option and its values, such as chunk=128,256,512. May be repeated."
_METRIC_HELP = "The metric to optimize, such as ttft_mean, tpot_p90 or goodput."
_HALVING_HELP = "Drop the worse half after a few seeds, instead of running the whole grid."
_BASELINE_HELP = "The policy to compare with; it also measures the capacity."


def sweep_options(
    policy: Annotated[str, Parameter(help="The policy: a name, or ./file.py:Class.")],
    /,
    *,
    option: Annotated[tuple[str, ...], Parameter(help=_OPTION_HELP)],
    metric: Annotated[str, Parameter(help=_METRIC_HELP)] = "e2e_mean",
    halving: Annotated[bool, Parameter(negative="", help=_HALVING_HELP)] = False,
    baseline: Annotated[str, Parameter(help=_BASELINE_HELP)] = "fcfs",
    experiment: Annotated[ExperimentOptions, Parameter(name="*")] = DEFAULT_OPTIONS,
    run: Annotated[RunFlags, Parameter(name="*")] = DEFAULT_RUN,
) -> int:
    """Find the best options of a policy for a workload and a load (0.9 by default)."""
    values = dict(parse_option(text) for text in option)
    if len(values) != len(option):
        raise UserError("an option occurs twice; write all of its values in one --option.")
    fields = {"loads": (0.9,), "name": f"sweep of {policy}", "policies": (baseline,)}
    spec = one_load(experiment.make_spec(fields))
    candidates = candidates_of(policy, values)
    check_policies(spec.policies, trust_local_code=run.trust_local_code)
    check_candidates(candidates, trust_local_code=run.trust_local_code)
    with progress_bar(spec.name) as show:
        result = sweep(
            spec,
            candidates,
            metric,
            RunOptions(
                out=run.out,
                num_workers=run.num_workers,
                trust_local_code=run.trust_local_code,
                on_progress=show,
            ),
            halving=halving,
            on_round=lambda count, seeds: print_line(
                f"{count_text(count, 'candidate')} on {count_text(seeds, 'seed')}"
            ),
        )
    rows = [
        (
            item.name,
            "failed" if item.mean is None else number_text(item.mean),
            item.verdict,
            str(item.num_seeds),
        )
        for item in result.candidates
    ]
    print_table(("options", metric, f"compared with {baseline}", "seeds"), rows)
    if result.tied:
        print_line(f"Not distinguishable from the best: {', '.join(result.tied)}.")
    with output_errors("out", run.out):
        paths = export_results(result.results, run.out)
    for path in paths:
        print_line(f"Wrote {path}")
    return 1 if result.results.failures else 0
