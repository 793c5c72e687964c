"""The step-time model "calibrated": the terms and the residuals of a calibration file."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from dovetail.plan import SchedulerOutput
from dovetail_lab.simulation.previous_step import After
from dovetail_lab.simulation.setup import Times
from dovetail_lab.simulation.step_times import StepFeatures
from dovetail_lab.step_times.calibration import Calibration
from dovetail_lab.step_times.fitting import TERMS, DecodeKnots, Knots, feature_values

_PS_PER_NS = 1000
_ONE = 4096
"""Factors are integers in units of 1/4096, so that times are exact."""
Floats: TypeAlias = Sequence[float]


class CalibratedStepTimes:
    """Computes step times with the constants of a calibration. All arithmetic is in integers."""

    def __init__(self, calibration: Calibration) -> None:
        self.name = f"calibrated:{calibration.model.name}"
        self._terms = [calibration.step_ps[name] for name in TERMS]
        self._decode = _DecodeFactors(calibration.decode_factors)
        self._prefill = _Line(1, *_columns(calibration.prefill_factors))
        self._change_ns = 0, *(time_ps // _PS_PER_NS for time_ps in calibration.batch_change_ps)
        self._gap_ps = *calibration.gap_ps, 0
        self._prefill_gap_ps = calibration.prefill_gap_ps

    def step_ns(self, plan: SchedulerOutput) -> int:
        """Return the time of one step."""
        return self.time_ns(StepFeatures.of(plan))

    def time_ns(self, features: StepFeatures, after: After = After.SAME) -> int:
        """Return the time of a step with these features, given what the step before ran."""
        values = feature_values(features)
        time_ps = sum(term * value for term, value in zip(self._terms, values, strict=True))
        if features.num_prefills:
            factor = self._prefill.at(features.num_prefill_tokens + features.num_decodes)
        else:
            factor = self._decode.line(features.num_decodes).at(features.num_kv_tokens)
        return max(1, time_ps * factor // (_ONE * _PS_PER_NS)) + self.batch_change_ns(after)

    def batch_change_ns(self, after: After) -> int:
        """Return the additional time of a decode-only step, given the step before; 0 for SAME."""
        return self._change_ns[after]

    def decode_times_ns(self, num_requests: int, num_kv_tokens: int, num_steps: int) -> Times:
        """Return the times of consecutive decode steps of the same requests."""
        first = StepFeatures(0, 0, num_requests, num_kv_tokens, 0, 0, 0)
        values = feature_values(first)
        first_ps = sum(term * value for term, value in zip(self._terms, values, strict=True))
        more_ps = self._terms[TERMS.index("kv_token")] * num_requests
        line, divisor = self._decode.line(num_requests), _ONE * _PS_PER_NS
        last_tokens = num_kv_tokens + num_requests * num_steps
        if max(first_ps + more_ps * num_steps, last_tokens) * line.maximum < 2**62:
            steps = np.arange(num_steps, dtype=np.int64)
            factors = line.at_each(num_kv_tokens + num_requests * steps)
            return np.maximum(1, (first_ps + more_ps * steps) * factors // divisor)
        times = [
            max(
                1,
                (first_ps + more_ps * step)
                * line.at(num_kv_tokens + num_requests * step)
                // divisor,
            )
            for step in range(num_steps)
        ]
        return np.array(times, dtype=np.int64)

    def gap_ns(self, num_runs: int, num_prefill_tokens: int = 0) -> int:
        """Return the host's time from the end of a step to the plan of the next one."""
        terms = self._prefill_gap_ps if num_prefill_tokens else self._gap_ps
        constant_ps, run_ps, token_ps = terms
        return (constant_ps + run_ps * num_runs + token_ps * num_prefill_tokens) // _PS_PER_NS


class _Line:
    """A piecewise linear function of a number of tokens, in integers of 1/4096.

    Outside of the positions, the function is constant. maximum: an upper bound of the values and of
    the differences between them, at least 1.
    """

    def __init__(self, scale: int, positions: Floats, factors: Floats) -> None:
        """Create the function. scale: multiplies the positions. No positions: the value is 1."""
        self._tokens = [round(float(item) * scale) for item in positions] or [0]
        self._values = [round(float(item) * _ONE) for item in factors] or [_ONE]
        self._all_tokens = np.array(self._tokens, dtype=np.int64)
        self._all_values = np.array(self._values, dtype=np.int64)
        self.maximum = max(self._values)

    def at(self, num_tokens: int) -> int:
        """Return the value for a number of tokens."""
        after = bisect_right(self._tokens, num_tokens)
        if not 0 < after < len(self._tokens):
            return self._values[min(after, len(self._tokens) - 1)]
        begin, end = self._tokens[after - 1], self._tokens[after]
        low, high = self._values[after - 1], self._values[after]
        return low + (high - low) * (num_tokens - begin) // (end - begin)

    def at_each(self, num_tokens: Times) -> Times:
        """Vectorized `at`: return the value for each number of tokens."""
        last = len(self._tokens) - 1
        if not last:
            return np.full(len(num_tokens), self._values[0], dtype=np.int64)
        after = np.clip(np.searchsorted(self._all_tokens, num_tokens, side="right"), 1, last)
        begin, end = self._all_tokens[after - 1], self._all_tokens[after]
        low, high = self._all_values[after - 1], self._all_values[after]
        return low + (high - low) * (np.clip(num_tokens, begin, end) - begin) // (end - begin)


class _DecodeFactors:
    """A bilinear function of the number of requests and of cached tokens per request.

    Outside of the table, the values at its edge apply.
    """

    def __init__(self, tables: DecodeKnots) -> None:
        self._rows = [rows for rows, _ in tables]
        self._tables = [_columns(knots) for _, knots in tables]
        self._lines: dict[int, _Line] = {}

    def line(self, num_rows: int) -> _Line:
        """Return the factor for `num_rows` requests as a function of their total cached tokens."""
        line = self._lines.get(num_rows)
        if line is None:
            line = self._lines[num_rows] = self._make_line(num_rows)
        return line

    def _make_line(self, num_rows: int) -> _Line:
        if not self._rows:
            return _Line(1, (), ())
        after = min(bisect_left(self._rows, num_rows), len(self._rows) - 1)
        before = max(0, after - 1) if self._rows[after] > num_rows else after
        (low, low_factors), (high, high_factors) = self._tables[before], self._tables[after]
        distance = self._rows[after] - self._rows[before]
        share = (num_rows - self._rows[before]) / distance if distance else 0.0
        positions = sorted({*low, *high})
        factors = (1 - share) * np.interp(positions, low, low_factors)
        factors += share * np.interp(positions, high, high_factors)
        return _Line(num_rows, positions, factors.tolist())


def _columns(knots: Knots) -> tuple[Floats, Floats]:
    return [float(tokens) for tokens, _ in knots], [factor for _, factor in knots]
