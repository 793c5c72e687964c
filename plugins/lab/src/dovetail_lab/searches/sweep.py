"""Searches the options of a policy: a grid, or successive halving.

Successive halving runs all candidates on few seeds, keeps the best part, and doubles the seeds.
Runs are reused from round to round. Source: K. Jamieson and A. Talwalkar,
"Non-stochastic Best Arm Identification and Hyperparameter Optimization", AISTATS 2016.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from dovetail.errors import UserError
from dovetail_lab.experiments.comparison import compare, rank_policies, with_verdicts
from dovetail_lab.experiments.experiment import RunOptions, run_experiment
from dovetail_lab.experiments.metric_table import METRICS
from dovetail_lab.experiments.results import Cell, Results
from dovetail_lab.experiments.spec import ExperimentSpec, PolicySpec

MAX_CANDIDATES = 1000
_ETA = 2
_FIRST_SEEDS = 2


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A candidate of a sweep.

    mean: mean of the metric over seeds; None if no run is complete. verdict: see `Comparison`,
    against the baseline. num_seeds: number of seeds with a complete run.
    """

    name: str
    options: Mapping[str, Any]
    mean: float | None
    verdict: str
    num_seeds: int


@dataclass(frozen=True, kw_only=True)
class SweepResult:
    """The result of a sweep. candidates: from best to worst. results: of the last round.

    tied: names that are not distinguishable from the best one.
    """

    candidates: Sequence[Candidate]
    tied: Sequence[str]
    results: Results


def parse_option(text: str) -> tuple[str, list[Any]]:
    """Return the name and values of "chunk=128,256"; values are JSON, or else strings."""
    name, equals, values = text.partition("=")
    if not equals or not name.strip() or not values.strip():
        raise UserError(f"option {text!r} is not of the form NAME=VALUE,VALUE.")
    return name.strip(), [_value(part.strip()) for part in values.split(",")]


def candidates_of(policy: str, options: Mapping[str, Sequence[Any]]) -> list[PolicySpec]:
    """Return one policy per combination of values."""
    for name, listed in options.items():
        texts = [str(value) for value in listed]
        twice = next((text for text in texts if texts.count(text) > 1), None)
        if twice is not None:
            raise UserError(f"option {name!r} has the value {twice} twice.")
    num_candidates = math.prod(len(listed) for listed in options.values())
    if not 2 <= num_candidates <= MAX_CANDIDATES:
        raise UserError(
            f"the sweep has {num_candidates} combinations of options; it needs 2 to "
            f"{MAX_CANDIDATES}."
        )
    names = list(options)
    matches = []
    for values in product(*(options[name] for name in names)):
        chosen = dict(zip(names, values, strict=True))
        label = ",".join(f"{name}={value}" for name, value in chosen.items())
        matches.append(PolicySpec(policy=policy, options=chosen, label=label))
    return matches


def sweep(
    spec: ExperimentSpec,
    candidates: Sequence[PolicySpec],
    metric: str,
    options: RunOptions,
    *,
    halving: bool,
    on_round: Callable[[int, int], None] = lambda num_candidates, num_seeds: None,
) -> SweepResult:
    """Run the candidates against the baseline of `spec`, at its first load.

    on_round: called before each round with the numbers of candidates and seeds. Raises UserError if
    the metric is unknown or neither low nor high values are better.
    """
    if metric not in METRICS or not METRICS[metric].better:
        known = ", ".join(name for name, item in METRICS.items() if item.better)
        raise UserError(f"metric={metric!r} is not one of {known}.")
    if options.pool is None:
        with options.make_pool() as pool:
            shared = replace(options, pool=pool)
            return sweep(spec, candidates, metric, shared, halving=halving, on_round=on_round)
    num_seeds = min(_FIRST_SEEDS, spec.seeds) if halving else spec.seeds
    left, dropped = list(candidates), list[Candidate]()
    while True:
        on_round(len(left), num_seeds)
        trial = spec.model_copy(
            update={"policies": (spec.policies[0], *left), "loads": spec.loads[:1]}
        )
        results = run_experiment(trial, replace(options, max_seeds=num_seeds))
        ranked = _ranked(results, metric, left)
        if num_seeds >= spec.seeds:
            break
        num_kept = max(2, -(-len(ranked) // _ETA))
        dropped = ranked[num_kept:] + dropped
        kept = {item.name for item in ranked[:num_kept]}
        left = [item for item in left if item.name in kept]
        num_seeds = min(spec.seeds, num_seeds * _ETA)
    engine, load = results.spec.engines[0], results.spec.loads[0]
    return SweepResult(
        candidates=[*ranked, *dropped],
        tied=rank_policies(results, engine, load, metric).tied,
        results=results,
    )


def _ranked(results: Results, metric: str, candidates: Sequence[PolicySpec]) -> list[Candidate]:
    """Return the candidates from best to worst. Candidates without a value are last."""
    engine, load, baseline = results.spec.engines[0], results.spec.loads[0], results.baseline
    matches = [compare(results, engine, load, metric, one.name, baseline) for one in candidates]
    judged = with_verdicts([one for one in matches if one is not None], results.spec.confidence)
    verdicts = {one.policy: one.verdict for one in judged}
    sign = 1 if METRICS[metric].better == "lower" else -1
    ranked = []
    for one in candidates:
        values = results.values(Cell(engine=engine, policy=one.name, load=load), metric)
        mean = sum(values.values()) / len(values) if values else None
        ranked.append(
            Candidate(
                name=one.name,
                options=one.options,
                mean=mean,
                verdict=verdicts.get(one.name, "failed"),
                num_seeds=len(values),
            )
        )
    return sorted(ranked, key=lambda one: (one.mean is None, sign * (one.mean or 0.0)))


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
