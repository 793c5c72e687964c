"""The step-time model "calibrated": the terms and the residuals of a calibration file."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dovetail.plan import SchedulerOutput
from dovetail_lab.simulation.setup import Times
from dovetail_lab.simulation.step_times import StepFeatures
from dovetail_lab.step_times.calibration import Calibration
from dovetail_lab.step_times.fitting import TERMS, feature_values

_PS_PER_NS = 1000
_ONE = 4096
"""Factors are integers in units of 1/4096, so that times are exact."""


class CalibratedStepTimes:
    """Computes step times with the constants of a calibration. All arithmetic is in integers."""

    def __init__(self, calibration: Calibration) -> None:
        self.name = f"calibrated:{calibration.model.name}"
        self._terms = [calibration.step_ps[name] for name in TERMS]
        self._decode = _Factors(calibration.decode_factors)
        self._prefill = _Factors(calibration.prefill_factors)
        self._gap_ps, self._gap_run_ps = calibration.gap_ps

    def step_ns(self, plan: SchedulerOutput) -> int:
        """Return the time of one step."""
        return self.time_ns(StepFeatures.of(plan))

    def time_ns(self, features: StepFeatures) -> int:
        """Return the time of a step with these features."""
        values = feature_values(features)
        time_ps = sum(term * value for term, value in zip(self._terms, values, strict=True))
        factors = self._prefill if features.num_prefills else self._decode
        factor = factors.at(features.num_prefill_tokens + features.num_decodes)
        return max(1, time_ps * factor // (_ONE * _PS_PER_NS))

    def decode_times_ns(self, num_requests: int, num_kv_tokens: int, num_steps: int) -> Times:
        """Return the times of consecutive decode steps of the same requests."""
        first = StepFeatures(0, 0, num_requests, num_kv_tokens, 0, 0, 0)
        values = feature_values(first)
        first_ps = sum(term * value for term, value in zip(self._terms, values, strict=True))
        more_ps = self._terms[TERMS.index("kv_token")] * num_requests
        factor = self._decode.at(num_requests)
        steps = range(num_steps)
        divisor = _ONE * _PS_PER_NS
        if (first_ps + more_ps * num_steps) * factor < 2**62:
            time_ps = first_ps + more_ps * np.arange(num_steps, dtype=np.int64)
            return np.maximum(1, time_ps * factor // divisor)
        times = [max(1, (first_ps + more_ps * step) * factor // divisor) for step in steps]
        return np.array(times, dtype=np.int64)

    def gap_ns(self, num_runs: int) -> int:
        """Return the host's time from the end of a step to the plan of the next one."""
        return (self._gap_ps + self._gap_run_ps * num_runs) // _PS_PER_NS


class _Factors:
    """A piecewise linear function of the tokens in a step, in units of 1/4096."""

    def __init__(self, knots: Sequence[tuple[int, float]]) -> None:
        self._tokens = np.array([tokens for tokens, _ in knots], dtype=np.float64)
        self._factors = np.array([factor for _, factor in knots], dtype=np.float64)
        self._known: dict[int, int] = {}

    def at(self, num_tokens: int) -> int:
        """Return the factor of a step with `num_tokens`. The first and last values continue."""
        factor = self._known.get(num_tokens)
        if factor is None:
            factor = _ONE
            if len(self._tokens):
                factor = round(float(np.interp(num_tokens, self._tokens, self._factors)) * _ONE)
            self._known[num_tokens] = factor
        return factor
