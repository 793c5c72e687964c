"""`dovetail lab adversary`: find a workload on which a policy is much worse than another."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from dovetail.cli.plugins_table import print_line
from dovetail.errors import UserError
from dovetail_lab.commands.experiment_options import (
    DEFAULT_OPTIONS,
    DEFAULT_RUN,
    ExperimentOptions,
    RunFlags,
)
from dovetail_lab.commands.policy_check import check_policies
from dovetail_lab.experiments.experiment import RunOptions
from dovetail_lab.output_errors import output_errors
from dovetail_lab.searches.adversary import Trial, search_adversary

_POLICY_HELP = "The policy A, whose regret is maximized."
_AGAINST_HELP = "The policy B, with which A is compared."
_METRIC_HELP = "The metric of the regret, such as ttft_mean or goodput."
_TRIALS_HELP = "Number of workloads to try."
_SEED_HELP = "Seed of the search."


def adversary(
    policy: Annotated[str, Parameter(help=_POLICY_HELP)],
    against: Annotated[str, Parameter(help=_AGAINST_HELP)],
    /,
    *,
    metric: Annotated[str, Parameter(help=_METRIC_HELP)] = "e2e_mean",
    trials: Annotated[int, Parameter(help=_TRIALS_HELP)] = 40,
    seed: Annotated[int, Parameter(help=_SEED_HELP)] = 0,
    experiment: Annotated[ExperimentOptions, Parameter(name="*")] = DEFAULT_OPTIONS,
    run: Annotated[RunFlags, Parameter(name="*")] = DEFAULT_RUN,
) -> int:
    """Search for a workload that maximizes the regret of one policy against another."""
    for option in ("trace", "load", "tenants"):
        if getattr(experiment, option) is not None:
            raise UserError(f"the search chooses the workload and the load; omit --{option}.")
    name = f"{policy} against {against}"
    fields = {
        "name": name,
        "policies": (against, policy),
        "seeds": 3,
        "workload": {"synthetic": "chat", "num_requests": 300},
    }
    spec = experiment.make_spec(fields)
    check_policies(spec.policies, trust_local_code=run.trust_local_code)
    best = [float("-inf")]

    def show(number: int, trial: Trial) -> None:
        if trial.regret > best[0]:
            best[0] = trial.regret
            print_line(f"trial {number + 1} of {trials}: regret {trial.regret:+.1%}")

    options = RunOptions(
        out=run.out, num_workers=run.num_workers, trust_local_code=run.trust_local_code
    )
    result = search_adversary(spec, metric, trials, options, seed=seed, on_trial=show)
    for parameter, value in result.worst.parameters.items():
        print_line(f"  {parameter:<14} {value:.4g}")
    comparison = result.confirmed.comparison
    verdict = comparison.verdict if comparison else "failed"
    print_line(
        f"With {result.spec.seeds} new seeds, {policy} has a regret of "
        f"{result.confirmed.regret:+.1%} in {metric} ({verdict})."
    )
    path = run.out / "adversary.json"
    with output_errors("out", run.out):
        path.write_text(result.spec.model_dump_json(indent=1), "utf-8")
    print_line(f"Wrote {path}. Repeat it with: dovetail lab compare {path}")
    return 0
