"""Compares statistics of paired runs with published values, and tests their error rates."""

import math
from random import Random

import pytest

from dovetail_lab.experiments import statistics
from dovetail_lab.experiments.statistics import (
    holm,
    mean_interval,
    paired_difference,
    quantile,
    t_cdf,
    t_quantile,
)


@pytest.mark.parametrize(
    ("probability", "degrees", "expected"),
    [
        (0.975, 1, 12.706),
        (0.975, 4, 2.776),
        (0.975, 9, 2.262),
        (0.995, 9, 3.250),
        (0.95, 30, 1.697),
        (0.975, 1000, 1.962),
    ],
)
def test_quantiles_of_the_t_distribution_equal_published_tables(probability, degrees, expected):
    assert t_quantile(probability, degrees) == pytest.approx(expected, abs=6e-4)
    assert t_cdf(t_quantile(probability, degrees), degrees) == pytest.approx(probability)
    assert t_cdf(-1.3, degrees) == pytest.approx(1 - t_cdf(1.3, degrees))


@pytest.mark.parametrize("arguments", [(0.4, 3), (1.0, 3), (0.9, 0)])
def test_an_undefined_quantile_of_the_t_distribution_is_rejected(arguments):
    with pytest.raises(ValueError, match="not defined"):
        t_quantile(*arguments)


def test_quantiles_interpolate_and_are_infinite_only_if_they_reach_censored_values():
    values = [1.0, 2.0, 3.0, 4.0, math.inf]
    assert quantile(values, 0.5) == 3.0 and quantile(values, 0.125) == 1.5
    assert quantile(values, 0.75) == 4.0 and quantile(values, 0.76) == math.inf
    assert quantile([math.inf], 0.5) == math.inf
    with pytest.raises(ValueError, match="at least one"):
        quantile([], 0.5)


def test_a_textbook_paired_t_test_is_reproduced():
    """Gosset's data on two soporifics (1908): t = 4.0621 with 9 degrees, p = 0.002833."""
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    result = paired_difference(first, second)
    assert result.t.mean == pytest.approx(1.58)
    assert (result.t.low, result.t.high) == pytest.approx((0.7001, 2.4599), abs=1e-4)
    assert result.p_value == pytest.approx(0.002833, abs=1e-6)
    assert result.excludes_zero and 0.7 < result.boot_low < result.boot_high < 2.5
    assert result.relative == pytest.approx(1.58 / 0.75)


def test_pairing_removes_the_common_variation():
    rng = Random(1)
    common = [rng.gauss(100, 50) for _ in range(10)]
    left = [value + rng.gauss(0, 1) for value in common]
    right = [value + 3 + rng.gauss(0, 1) for value in common]
    assert paired_difference(left, right).excludes_zero
    a, b = mean_interval(left), mean_interval(right)
    assert a.high > b.mean and b.low < a.mean


@pytest.mark.costly
def test_confidence_intervals_have_the_stated_coverage():
    rng, covered, bootstrap = Random(2), 0, 0
    for trial in range(400):
        values = [rng.gauss(5, 2) for _ in range(10)]
        result = paired_difference([0.0] * 10, values, seed=trial)
        covered += result.t.low <= 5 <= result.t.high
        bootstrap += result.boot_low <= 5 <= result.boot_high
    assert 0.92 <= covered / 400 <= 0.98
    assert 0.84 <= bootstrap / 400 <= 0.97


def test_a_single_pair_has_no_interval_and_equal_pairs_have_no_difference():
    result = paired_difference([1.0], [2.0])
    assert math.isnan(result.t.low) and result.p_value == 1.0 and not result.excludes_zero
    equal = paired_difference([1.0, 2.0], [1.0, 2.0])
    assert equal.p_value == 1.0 and not equal.excludes_zero
    constant = paired_difference([1.0, 2.0], [3.0, 4.0])
    assert constant.p_value == 0.0 and constant.excludes_zero
    for arguments in (([1.0], []), ([], [])):
        with pytest.raises(ValueError, match="the same number of values"):
            paired_difference(*arguments)


def test_holm_adjusts_for_the_number_of_comparisons():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []


@pytest.mark.costly
def test_holm_controls_the_false_positive_rate_over_many_comparisons(monkeypatch):
    monkeypatch.setattr(statistics, "NUM_RESAMPLES", 2)
    rng, plain, adjusted = Random(3), 0, 0
    for _ in range(150):
        p_values = [
            paired_difference([0.0] * 8, [rng.gauss(0, 1) for _ in range(8)]).p_value
            for _ in range(10)
        ]
        plain += min(p_values) < 0.05
        adjusted += min(holm(p_values)) < 0.05
    assert plain / 150 > 0.25 and adjusted / 150 < 0.1
