"""Fits step times to measured steps: non-negative least squares, and a table of residuals.

The errors are relative: a step of 1 ms counts as much as a step of 100 ms. The table of residuals
corrects what a sum of terms cannot describe, such as a matrix product whose time is not linear in
the number of tokens. The correction does not change the sum of the times. Steps without prefills
have a two-dimensional table, because the time of a cached token depends on the level of the
processor's cache that holds the keys and values of all requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from dovetail.errors import UserError
from dovetail_lab.simulation.previous_step import After
from dovetail_lab.simulation.step_times import StepFeatures
from dovetail_lab.step_times.samples import StepSample

TERMS = (
    "step",
    "prefill_token",
    "prefill",
    "decode",
    "kv_token",
    "context_pair",
    "join",
    "first",
)
"""The terms of a step's time; each is multiplied by a feature of the step."""
MIN_SAMPLES = 50
_MIN_PER_BIN = 8
_MAX_EXACT = 32
_CONTEXT_RATIO, _MIN_CONTEXT = 1.25, 16
"""Context lengths in one bin differ by at most this factor; short contexts share one bin."""
_FACTOR_LIMITS = 0.25, 4.0
_PS_PER_NS = 1000

Matrix = np.ndarray[tuple[int, int], np.dtype[np.float64]]
Vector = np.ndarray[tuple[int], np.dtype[np.float64]]
Knots = tuple[tuple[int, float], ...]
"""Pairs of (tokens, factor), with increasing tokens."""
DecodeKnots = tuple[tuple[int, Knots], ...]
"""Pairs of (rows, factors by cached tokens per row), with increasing rows."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The result of a fit.

    step_ps: picoseconds per unit of each term of `TERMS`. batch_change_ps: the additional time of a
    step that only decodes, after decodes of other requests and after prefills. gap_ps: the gap
    after a step without prefills, constant and per request. prefill_gap_ps: the gap after a step
    with prefills, constant, per request and per prefill token. decode_factors: residuals of steps
    without prefills, by number of requests and cached tokens per request. prefill_factors:
    residuals of steps with prefills, by tokens in the step.
    """

    step_ps: Mapping[str, int]
    batch_change_ps: tuple[int, int]
    gap_ps: tuple[int, int]
    prefill_gap_ps: tuple[int, int, int]
    decode_factors: DecodeKnots
    prefill_factors: Knots


def feature_values(features: StepFeatures) -> tuple[int, ...]:
    """Return the features of a step by which `TERMS` are multiplied."""
    return (
        1,
        features.num_prefill_tokens,
        features.num_prefills,
        features.num_decodes,
        features.num_kv_tokens,
        features.num_context_pairs,
        features.num_joins,
        features.is_first,
    )


def fit_steps(samples: Sequence[StepSample]) -> Fit:
    """Fit measured steps. Raises UserError if there are too few."""
    if len(samples) < MIN_SAMPLES:
        raise UserError(
            f"only {len(samples)} steps were measured; a fit needs at least {MIN_SAMPLES}."
        )
    matrix = np.array([feature_values(item.features) for item in samples], dtype=np.float64)
    times = np.array([item.duration_ns for item in samples], dtype=np.float64) * _PS_PER_NS
    after = np.array([item.after for item in samples])
    changes = np.stack([after == After.OTHERS, after == After.PROMPTS], axis=1).astype(np.float64)
    columns = np.concatenate([matrix, changes], axis=1) / times[:, None]
    terms = np.round(nonnegative_least_squares(columns, np.ones(len(times))))
    step_ps, batch_change_ps = terms[: len(TERMS)], terms[len(TERMS) :]
    predicted = matrix @ step_ps
    is_decode = matrix[:, TERMS.index("prefill")] == 0
    tokens = matrix[:, TERMS.index("prefill_token")] + matrix[:, TERMS.index("decode")]
    runs = matrix[:, TERMS.index("prefill")] + matrix[:, TERMS.index("decode")]
    rest = np.maximum(times - changes @ batch_change_ps, 0.0)
    gaps = np.array([item.gap_ns for item in samples], dtype=np.float64) * _PS_PER_NS
    causes = np.stack([np.ones(len(runs)), runs, matrix[:, TERMS.index("prefill_token")]], axis=1)
    constant, per_run = _fit_gaps(causes[is_decode, :2], gaps[is_decode])
    prefill_gap_ps = constant, per_run, 0
    if np.count_nonzero(~is_decode) >= _MIN_PER_BIN:
        first, second, third = _fit_gaps(causes[~is_decode], gaps[~is_decode])
        prefill_gap_ps = first, second, third
    return Fit(
        step_ps={name: int(value) for name, value in zip(TERMS, step_ps, strict=True)},
        batch_change_ps=(int(batch_change_ps[0]), int(batch_change_ps[1])),
        gap_ps=(constant, per_run),
        prefill_gap_ps=prefill_gap_ps,
        decode_factors=_decode_residuals(matrix[is_decode], predicted[is_decode], rest[is_decode]),
        prefill_factors=_residuals(tokens[~is_decode], predicted[~is_decode], times[~is_decode]),
    )


def nonnegative_least_squares(matrix: Matrix, target: Vector) -> Vector:
    """Return the vector x ≥ 0 that minimizes the length of `matrix @ x - target`.

    There are few columns, so the least-squares problem is solved for every subset of them. The best
    non-negative solution is returned.
    """
    num_columns = matrix.shape[1]
    scale = np.sqrt((matrix * matrix).sum(axis=0))
    used = [column for column in range(num_columns) if scale[column] > 0]
    scaled = matrix / np.where(scale > 0, scale, 1.0)
    gram, moments = scaled.T @ scaled, scaled.T @ target
    best, best_error = np.zeros(num_columns), 0.0
    for size in range(1, len(used) + 1):
        for subset in combinations(used, size):
            part = list(subset)
            solution = np.linalg.lstsq(gram[np.ix_(part, part)], moments[part], rcond=1e-10)[0]
            error = float(solution @ gram[np.ix_(part, part)] @ solution)
            error -= 2 * float(solution @ moments[part])
            if (solution >= 0).all() and error < best_error - 1e-12:
                best, best_error = np.zeros(num_columns), error
                best[part] = solution
    return best / np.where(scale > 0, scale, 1.0)


def _fit_gaps(matrix: Matrix, gaps: Vector) -> Sequence[int]:
    """Return the time of each column of `matrix`. The sum of the gaps does not change."""
    if not len(gaps):
        return [0] * matrix.shape[1]
    ends = np.quantile(gaps, 0.99)
    terms = nonnegative_least_squares(matrix, np.minimum(gaps, ends))
    total = float((matrix @ terms).sum())
    factor = float(gaps.sum()) / total if total else 1.0
    return [int(value) for value in np.round(terms * factor)]


def _residuals(tokens: Vector, predicted: Vector, measured: Vector) -> Knots:
    """Return the residuals by tokens in the step. Bins grow by a quarter of an octave."""
    bins = np.floor(4 * np.log2(np.maximum(tokens, 1)))
    chosen = (bins == number for number in np.unique(bins))
    knots = (_knot(tokens[item], predicted[item], measured[item]) for item in chosen)
    return tuple(dict(knot for knot in knots if knot is not None).items())


def _decode_residuals(matrix: Matrix, predicted: Vector, measured: Vector) -> DecodeKnots:
    """Return the residuals by number of requests and cached tokens per request.

    Each number of requests up to `_MAX_EXACT` has a separate table.
    """
    rows = matrix[:, TERMS.index("decode")]
    contexts = matrix[:, TERMS.index("kv_token")] / np.maximum(rows, 1)
    bins = np.where(rows <= _MAX_EXACT, rows - 1e6, np.floor(4 * np.log2(np.maximum(rows, 1))))
    tables = {}
    for number in np.unique(bins):
        (steps,) = np.nonzero(bins == number)
        steps = steps[np.argsort(contexts[steps], kind="stable")]
        parts = np.split(steps, _bin_starts(contexts[steps])[1:])
        knots = [_knot(contexts[part], predicted[part], measured[part]) for part in parts]
        table = dict(knot for knot in knots if knot is not None)
        if table:
            tables[round(float(rows[steps].mean()))] = tuple(sorted(table.items()))
    return tuple(sorted(tables.items()))


def _bin_starts(contexts: Vector) -> list[int]:
    """Return the start of each bin of sorted contexts. Bins have at least `_MIN_PER_BIN` steps."""
    starts, edge = [0], 0.0
    for index, context in enumerate(contexts):
        if index == starts[-1]:
            edge = _CONTEXT_RATIO * max(float(context), _MIN_CONTEXT)
        full = index - starts[-1] >= _MIN_PER_BIN and len(contexts) - index >= _MIN_PER_BIN
        if full and context > edge:
            starts.append(index)
            edge = _CONTEXT_RATIO * max(float(context), _MIN_CONTEXT)
    return starts


def _knot(tokens: Vector, predicted: Vector, measured: Vector) -> tuple[int, float] | None:
    """Return (mean tokens, sum of measured / sum of modeled times); None for too few steps."""
    if len(tokens) < _MIN_PER_BIN or predicted.sum() <= 0:
        return None
    ratio = float(measured.sum() / predicted.sum())
    factor = round(min(max(ratio, _FACTOR_LIMITS[0]), _FACTOR_LIMITS[1]), 5)
    return round(float(tokens.mean())), factor
