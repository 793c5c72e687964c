"""Compares policies by paired differences of their runs, and states a verdict in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dovetail_lab.experiments.metric_table import METRICS
from dovetail_lab.experiments.results import Cell, Results
from dovetail_lab.experiments.statistics import PairedDifference, holm, paired_difference

NOT_DISTINGUISHABLE = "not distinguishable"
ONE_SEED = "one seed: no interval"
EQUAL = "equal"
MIN_PAIRS = 2


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The difference between a policy and the baseline (policy minus baseline), over seeds.

    p_adjusted: the p value after Holm's correction for all comparisons of the same metric and
    engine. verdict: "better", "worse", "higher", "lower", "equal", `NOT_DISTINGUISHABLE` or
    `ONE_SEED`.
    """

    engine: str
    load: float
    metric: str
    policy: str
    baseline: str
    difference: PairedDifference
    p_adjusted: float = 1.0
    verdict: str = NOT_DISTINGUISHABLE


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The best policy of a metric at one load. tied: policies that are not distinguishable from it.

    best: "" if no policy has a value. equal: whether all policies have the same mean.
    """

    engine: str
    load: float
    metric: str
    best: str
    tied: Sequence[str]
    equal: bool = False

    def describe(self, num_policies: int) -> str:
        """Return the result in words. num_policies: policies of the experiment."""
        if self.equal:
            return EQUAL
        if not self.best or not self.tied:
            return self.best or "–"
        if len(self.tied) + 1 == num_policies:
            return f"{NOT_DISTINGUISHABLE}: all"
        return f"{NOT_DISTINGUISHABLE}: {', '.join((self.best, *self.tied))}"


def compare_all(results: Results, metric: str, engine: str) -> list[Comparison]:
    """Return the comparisons of every policy with the baseline at every load."""
    known = results.comparisons
    if (metric, engine) not in known:
        known[metric, engine] = _compare_all(results, metric, engine)
    return known[metric, engine]


def _compare_all(results: Results, metric: str, engine: str) -> list[Comparison]:
    baseline = results.baseline
    pairs = [
        (policy, load)
        for load in results.spec.loads
        for policy in results.policies
        if policy != baseline
    ]
    matches = [compare(results, engine, load, metric, policy, baseline) for policy, load in pairs]
    return with_verdicts([item for item in matches if item is not None], results.spec.confidence)


def compare(
    results: Results, engine: str, load: float, metric: str, policy: str, baseline: str
) -> Comparison | None:
    """Return one comparison without a verdict; None if no seed has both values."""
    left = results.values(Cell(engine=engine, policy=baseline, load=load), metric)
    right = results.values(Cell(engine=engine, policy=policy, load=load), metric)
    seeds = sorted(left.keys() & right.keys())
    if not seeds:
        return None
    difference = paired_difference(
        [left[seed] for seed in seeds],
        [right[seed] for seed in seeds],
        confidence=results.spec.confidence,
    )
    return Comparison(
        engine=engine,
        load=load,
        metric=metric,
        policy=policy,
        baseline=baseline,
        difference=difference,
    )


def with_verdicts(comparisons: Sequence[Comparison], confidence: float) -> list[Comparison]:
    """Return the comparisons, completed with adjusted p values and verdicts."""
    adjusted = holm([item.difference.p_value for item in comparisons])
    return [
        replace(item, p_adjusted=p_value, verdict=_verdict(item, p_value, 1 - confidence))
        for item, p_value in zip(comparisons, adjusted, strict=True)
    ]


def rank_policies(results: Results, engine: str, load: float, metric: str) -> Ranking:
    """Return the policy with the best mean, and those that are not distinguishable from it."""
    better = METRICS[metric].better
    means = {}
    for policy in results.policies:
        values = results.values(Cell(engine=engine, policy=policy, load=load), metric)
        if values:
            means[policy] = sum(values.values()) / len(values)
    nothing = Ranking(engine=engine, load=load, metric=metric, best="", tied=())
    if not means or not better:
        return nothing
    if len(means) > 1 and len(set(means.values())) == 1:
        return replace(nothing, equal=True)
    best = (min if better == "lower" else max)(means, key=lambda name: means[name])
    matches = [
        compare(results, engine, load, metric, policy, best) for policy in means if policy != best
    ]
    judged = with_verdicts([item for item in matches if item is not None], results.spec.confidence)
    clear = {item.policy for item in judged if item.verdict == "worse"}
    tied = tuple(policy for policy in means if policy != best and policy not in clear)
    return replace(nothing, best=best, tied=tied)


def _verdict(comparison: Comparison, p_value: float, level: float) -> str:
    difference = comparison.difference
    if difference.t.num_values < MIN_PAIRS:
        return ONE_SEED
    if not difference.t.mean and not difference.t.high:
        return EQUAL
    if p_value >= level or not difference.excludes_zero:
        return NOT_DISTINGUISHABLE
    word = "higher" if difference.t.mean > 0 else "lower"
    better = METRICS[comparison.metric].better
    if not better:
        return word
    return "better" if word == better else "worse"
