"""Statistics of paired runs: Student's t, bootstrap, quantiles. Pure Python.

Sources: W. Gosset, "The probable error of a mean", 1908; B. Efron and R. Tibshirani, "An
Introduction to the Bootstrap", 1993; S. Holm, "A simple sequentially rejective multiple test
procedure", 1979; the continued fraction of the incomplete beta function: Abramowitz and Stegun,
26.5.8.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

NUM_RESAMPLES = 2000
_MAX_TERMS = 300
_TINY = 1e-300


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean and its confidence interval; both limits are NaN for fewer than two values."""

    mean: float
    low: float
    high: float
    num_values: int


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """The mean difference of paired values (right minus left).

    t: interval by Student's t. boot_low, boot_high: percentile bootstrap interval. p_value: the p
    value of the two-sided paired t test; 1 if it cannot be computed. left, right: means of both
    sides.
    """

    left: float
    right: float
    t: Interval
    boot_low: float
    boot_high: float
    p_value: float

    @property
    def relative(self) -> float:
        """The difference divided by the left mean; NaN if that is 0."""
        return self.t.mean / self.left if self.left else math.nan

    @property
    def excludes_zero(self) -> bool:
        """Whether both intervals exclude zero."""
        lows = min(self.t.low, self.boot_low), max(self.t.high, self.boot_high)
        return lows[0] > 0 or lows[1] < 0


def quantile(values: Sequence[float], q: float) -> float:
    """Return a quantile of sorted values by linear interpolation, as numpy's default does.

    Censored values are passed as infinity; the result is infinite if it depends on one of them.
    Raises ValueError if there are no values.
    """
    if not values:
        raise ValueError("a quantile needs at least one value")
    position = q * (len(values) - 1)
    below = math.floor(position)
    rest = position - below
    low = values[below]
    if not rest or math.isinf(low):
        return low
    return low + rest * (values[below + 1] - low)


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Return the mean and its interval by Student's t."""
    count = len(values)
    mean = math.fsum(values) / count if count else math.nan
    if count < 2:
        return Interval(mean=mean, low=math.nan, high=math.nan, num_values=count)
    half = t_quantile(0.5 + confidence / 2, count - 1) * _standard_error(values, mean)
    return Interval(mean=mean, low=mean - half, high=mean + half, num_values=count)


def paired_difference(
    left: Sequence[float], right: Sequence[float], *, confidence: float = 0.95, seed: int = 0
) -> PairedDifference:
    """Return the paired difference of two policies. Values at the same index have the same seed.

    Raises ValueError if the lengths differ or are 0.
    """
    if len(left) != len(right) or not left:
        raise ValueError(
            "both policies need the same number of values, at least one; got "
            f"{len(left)} and {len(right)}"
        )
    differences = [b - a for a, b in zip(left, right, strict=True)]
    interval = mean_interval(differences, confidence)
    low, high = _bootstrap(differences, confidence, Random(f"bootstrap {seed}"))
    return PairedDifference(
        left=math.fsum(left) / len(left),
        right=math.fsum(right) / len(right),
        t=interval,
        boot_low=low,
        boot_high=high,
        p_value=_p_value(differences, interval.mean),
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p values for multiple comparisons by Holm's method. Return them in the same order."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted, highest = [1.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, p_values[index] * (len(order) - rank)))
        adjusted[index] = highest
    return adjusted


def t_quantile(probability: float, degrees: int) -> float:
    """Return the quantile of Student's t distribution; probability: 0.5 to below 1."""
    if not 0.5 <= probability < 1 or degrees < 1:
        raise ValueError(f"t_quantile({probability}, {degrees}) is not defined")
    low, high = 0.0, 1.0
    while t_cdf(high, degrees) < probability:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if t_cdf(middle, degrees) < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def t_cdf(value: float, degrees: int) -> float:
    """Return the probability that a t-distributed value is at most `value`."""
    x = degrees / (degrees + value * value)
    tail = _incomplete_beta(degrees / 2, 0.5, x) / 2
    return 1 - tail if value > 0 else tail


def _p_value(differences: Sequence[float], mean: float) -> float:
    if len(differences) < 2:
        return 1.0
    error = _standard_error(differences, mean)
    if not error:
        return 0.0 if mean else 1.0
    return 2 * (1 - t_cdf(abs(mean) / error, len(differences) - 1))


def _standard_error(values: Sequence[float], mean: float) -> float:
    squares = math.fsum((value - mean) ** 2 for value in values)
    return math.sqrt(squares / (len(values) - 1) / len(values))


def _bootstrap(differences: Sequence[float], confidence: float, rng: Random) -> tuple[float, float]:
    count = len(differences)
    if count < 2:
        return math.nan, math.nan
    means = sorted(
        math.fsum(rng.choices(differences, k=count)) / count for _ in range(NUM_RESAMPLES)
    )
    tail = (1 - confidence) / 2
    return quantile(means, tail), quantile(means, 1 - tail)


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Return the regularized incomplete beta function."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, 1 - x)
    front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    front = math.exp(front + a * math.log(x) + b * math.log1p(-x)) / a
    c, d = 1.0, 1 / _away_from_zero(1 - (a + b) * x / (a + 1))
    fraction = d
    for m in range(1, _MAX_TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        change = 1.0
        for term in (even, odd):
            d = 1 / _away_from_zero(1 + term * d)
            c = _away_from_zero(1 + term / c)
            change = c * d
            fraction *= change
        if abs(change - 1) < 1e-15:
            break
    return front * fraction


def _away_from_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
