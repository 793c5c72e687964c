"""Predictors use the declared output length of a request if it is valid."""

import math
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from dovetail.sampling_params import SamplingParams
from dovetail_sched_research.predictors import make_predictor
from dovetail_sched_research.sjf import SJFPolicy


def request(expected=None, sequence=0, maximum=500):
    extra = {} if expected is None else {"expected_tokens": expected}
    return SimpleNamespace(
        sequence=sequence,
        num_prompt_tokens=100,
        max_total_tokens=100 + maximum,
        sampling_params=SamplingParams(extra_args=extra),
    )


@pytest.mark.parametrize("expected", [1, 7, 7.5, 500])
def test_the_oracle_predictor_returns_the_declared_output_length(expected):
    assert make_predictor("oracle")(request(expected)) == expected


@pytest.mark.parametrize(
    "expected", [None, 0, -3, 501, True, "7", [7], math.nan, math.inf, -math.inf, 2**63]
)
def test_an_invalid_declaration_is_ignored(expected):
    for name in ("oracle", "bucketed:2", "noisy:0.5"):
        assert make_predictor(name)(request(expected)) == make_predictor(name)(request())
    assert make_predictor("oracle")(request(expected)) == 500


def test_a_noisy_prediction_is_constant_per_request_and_has_the_given_sigma():
    noisy = make_predictor("noisy:0.5")
    guesses = [noisy(request(100, number)) for number in range(2000)]
    assert guesses == [noisy(request(100, number)) for number in range(2000)]
    logs = [math.log(guess / 100) for guess in guesses]
    mean = sum(logs) / len(logs)
    width = math.sqrt(sum((log - mean) ** 2 for log in logs) / len(logs))
    assert abs(mean) < 0.04 and abs(width - 0.5) < 0.03  # three standard errors
    assert min(noisy(request(1, number)) for number in range(50)) == 1


def test_bucketed_predictions_are_powers_of_the_base():
    bucketed = make_predictor("bucketed:2")
    assert [bucketed(request(n)) for n in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]


def test_a_constant_prediction_gives_the_order_of_arrival():
    policy = SJFPolicy({"predictor": "constant:50"})
    ranks = [policy.rank(request(9 - n, sequence=n), None) for n in range(9)]
    assert ranks == sorted(ranks)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "Oracle",
        "oracle:2",
        "noisy",
        "noisy:x",
        "noisy:0",
        "noisy:nan",
        "bucketed:1",
        "constant:inf",
    ],
)
def test_an_invalid_predictor_is_rejected(name):
    with pytest.raises(ValidationError, match="predictor"):
        SJFPolicy({"predictor": name})
