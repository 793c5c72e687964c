"""Predictors of the output length, for policies that serve the shortest request first.

A predictor is a pure function of the request's declared length,
`SamplingParams(extra_args={"expected_tokens": n})`, or of its `max_tokens`. It does not know the
real output length; "oracle" is only as accurate as the declaration. A real predictor, for example a
small model that reads the prompt, can write its estimate into the request.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Annotated

from pydantic import AfterValidator

from dovetail.interfaces import RequestView

_MAX_ERROR = 300.0
"""Maximum logarithm of a factor; a larger one overflows."""

Predictor = Callable[[RequestView], float]
"""Returns the expected total number of output tokens of a request, at least 1."""


def expect_declared(request: RequestView) -> float:
    """Return the declared length if it is between 1 and `max_tokens`, else `max_tokens`."""
    maximum = request.max_total_tokens - request.num_prompt_tokens
    declared = request.sampling_params.extra_args.get("expected_tokens")
    if isinstance(declared, bool) or not isinstance(declared, int | float):
        return maximum
    return declared if 1 <= declared <= maximum else maximum


def make_predictor(text: str) -> Predictor:
    """Return a predictor by name. Raise ValueError if the name is unknown.

    oracle: `expect_declared`. noisy:SIGMA: the oracle times a log-normal factor, seeded by the
    request's position in arrival order. bucketed:BASE: the oracle rounded up to a power of
    BASE, as in S3 (Jin et al., NeurIPS 2023, arXiv:2306.06000). constant:N: returns N for all
    requests.
    """
    name, _, number = text.partition(":")
    if name == "oracle" and not number:
        return expect_declared
    make, minimum = _PREDICTORS.get(name, (None, 0.0))
    if make is None:
        known = "oracle, noisy:SIGMA, bucketed:BASE, constant:N"
        raise ValueError(f"unknown predictor {text!r}; choose one of {known}")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > minimum):
        raise ValueError(
            f"predictor {text!r}: write {name}:NUMBER, with a number above {minimum:g}"
        )
    return make(value)


def _noisy(sigma: float) -> Predictor:
    def expect_roughly(request: RequestView) -> float:
        error = Random(request.sequence).gauss(0.0, sigma)
        return max(1.0, expect_declared(request) * math.exp(min(error, _MAX_ERROR)))

    return expect_roughly


def _bucketed(base: float) -> Predictor:
    def expect_bucket(request: RequestView) -> float:
        # Rounded: the logarithm of a power of `base` may be slightly above the exponent.
        exponent = math.ceil(round(math.log(max(1.0, expect_declared(request)), base), 9))
        return base**exponent

    return expect_bucket


def _constant(value: float) -> Predictor:
    return lambda request: value


_PREDICTORS: dict[str, tuple[Callable[[float], Predictor], float]] = {
    "noisy": (_noisy, 0.0),
    "bucketed": (_bucketed, 1.0),
    "constant": (_constant, 0.0),
}
"""Maps a name to (factory, exclusive lower bound of its number)."""


def _checked(text: str) -> str:
    make_predictor(text)
    return text


PredictorName = Annotated[str, AfterValidator(_checked)]
"""The type of an option that names a predictor."""
