"""Searches for workloads on which one policy is much worse than another.

A workload is a mix of short and long requests with bursts, shared prefixes and tenants. The search
samples mixes, then changes the best mix in steps that become smaller. The best of many noisy
results is biased, so the final regret is measured with seeds that the search has not used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from dovetail.errors import UserError
from dovetail_lab.experiments.comparison import Comparison, compare, with_verdicts
from dovetail_lab.experiments.experiment import RunOptions, run_experiment
from dovetail_lab.experiments.metric_table import METRICS
from dovetail_lab.experiments.spec import ExperimentSpec
from dovetail_lab.workloads.spec import ArrivalSpec, Component, WorkloadSpec

BOUNDS: Mapping[str, tuple[float, float]] = {
    "load": (0.5, 1.2),
    "long_share": (0.01, 0.6),
    "short_prompt": (32, 2000),
    "long_prompt": (500, 8000),
    "short_output": (8, 300),
    "long_output": (50, 1500),
    "burstiness": (0.05, 1.0),
    "prefix_groups": (1, 64),
    "prefix_tokens": (1, 4096),
}
"""The range of each parameter; all are sampled on a logarithmic scale."""

_EXPLORE_SHARE = 0.5
_FIRST_STEP = 0.35
_LAST_STEP = 0.05


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One workload of a search. regret: how much worse A is than B, relative to B; NaN on failure.

    comparison: the comparison of A with B; None if no seed has both values.
    """

    parameters: Mapping[str, float]
    regret: float
    comparison: Comparison | None


@dataclass(frozen=True, kw_only=True)
class AdversaryResult:
    """The worst workload that was found.

    trials: all trials of the search. worst: the trial with the highest regret. confirmed: the same
    workload with new seeds. spec: an experiment that repeats the confirmation.
    """

    trials: Sequence[Trial]
    worst: Trial
    confirmed: Trial
    spec: ExperimentSpec


def search_adversary(
    spec: ExperimentSpec,
    metric: str,
    num_trials: int,
    options: RunOptions,
    *,
    seed: int = 0,
    on_trial: Callable[[int, Trial], None] = lambda number, trial: None,
) -> AdversaryResult:
    """Search `num_trials` workloads for two policies of `spec`: first B, then A.

    spec: provides the policies, the number of requests, the seeds and the engine. Raises UserError
    if there are not two policies, the metric is unknown, or every trial failed.
    """
    if len(spec.policies) != 2:
        raise UserError(f"an adversary needs two policies, got {len(spec.policies)}.")
    if metric not in METRICS or not METRICS[metric].better:
        raise UserError(
            f"metric={metric!r} is unknown, or neither high nor low values of it are better."
        )
    if num_trials < 2:
        raise UserError(f"trials={num_trials} must be at least 2.")
    if options.pool is None:
        with options.make_pool() as pool:
            shared = replace(options, pool=pool)
            return search_adversary(spec, metric, num_trials, shared, seed=seed, on_trial=on_trial)
    rng = Random(f"adversary {seed}")
    trials: list[Trial] = []
    for number in range(num_trials):
        parameters = _next_parameters(trials, number / num_trials, rng)
        trial = try_workload(experiment_of(spec, parameters), metric, options, parameters)
        trials.append(trial)
        on_trial(number, trial)
    complete = [trial for trial in trials if not math.isnan(trial.regret)]
    if not complete:
        raise UserError("every trial of the search failed; see workers.log in the directory --out.")
    result = max(complete, key=lambda trial: trial.regret)
    final = experiment_of(spec, result.parameters).model_copy(
        update={"first_seed": spec.first_seed + spec.seeds, "seeds": max(10, 2 * spec.seeds)}
    )
    confirmed = try_workload(final, metric, options, result.parameters)
    return AdversaryResult(trials=trials, worst=result, confirmed=confirmed, spec=final)


def experiment_of(spec: ExperimentSpec, parameters: Mapping[str, float]) -> ExperimentSpec:
    """Return the experiment with the workload that the parameters describe."""
    counts = {name: max(1, round(value)) for name, value in parameters.items()}
    share = parameters["long_share"]
    short = Component(
        name="short",
        share=1 - share,
        prompt_tokens=counts["short_prompt"],
        output_tokens=counts["short_output"],
        tenant="short",
        prefix_groups=counts["prefix_groups"],
        prefix_tokens=counts["prefix_tokens"],
    )
    long = Component(
        name="long",
        share=share,
        prompt_tokens=counts["long_prompt"],
        output_tokens=counts["long_output"],
        tenant="long",
    )
    old = spec.workload
    workload = WorkloadSpec(
        mix=(short, long),
        num_requests=old.num_requests,
        arrivals=ArrivalSpec(process="gamma", burstiness=parameters["burstiness"]),
        slo_classes=old.slo_classes,
        expected_tokens=old.expected_tokens,
    )
    load = float(f"{parameters['load']:.3g}")
    return spec.model_copy(update={"workload": workload, "loads": (load,)})


def try_workload(
    spec: ExperimentSpec, metric: str, options: RunOptions, parameters: Mapping[str, float]
) -> Trial:
    """Run both policies on a workload and return the regret of the second one."""
    failed = Trial(parameters=parameters, regret=math.nan, comparison=None)
    try:
        results = run_experiment(spec, options)
    except UserError:  # the burst failed: no capacity
        return failed
    better, worse = (policy.name for policy in spec.policies)
    result = compare(results, spec.engines[0], spec.loads[0], metric, worse, better)
    if result is None or not result.difference.left:
        return failed
    sign = 1 if METRICS[metric].better == "lower" else -1
    (judged,) = with_verdicts([result], spec.confidence)
    return replace(failed, regret=sign * result.difference.relative, comparison=judged)


def _next_parameters(trials: Sequence[Trial], progress: float, rng: Random) -> dict[str, float]:
    """Return random parameters in the first half, then changes of the best ones so far."""
    complete = [trial for trial in trials if not math.isnan(trial.regret)]
    if progress < _EXPLORE_SHARE or not complete:
        return {name: _at(name, rng.random()) for name in BOUNDS}
    best = max(complete, key=lambda trial: trial.regret).parameters
    width = _FIRST_STEP + (_LAST_STEP - _FIRST_STEP) * (progress - _EXPLORE_SHARE) * 2
    return {
        name: _at(name, min(1.0, max(0.0, _position(name, best[name]) + rng.gauss(0, width))))
        for name in BOUNDS
    }


def _at(name: str, position: float) -> float:
    low, high = BOUNDS[name]
    return float(low * (high / low) ** position)


def _position(name: str, value: float) -> float:
    low, high = BOUNDS[name]
    return math.log(value / low) / math.log(high / low)
