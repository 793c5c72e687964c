"""The conformance cases of `draw_tokens`, for providers that override it.

They check which tokens can be sampled, how often, and that a row's token depends on that row only.
Random numbers differ by provider, so samples are compared with probabilities (`drawing_law`), not
with draws of another provider. torch is imported within functions.

Dimensions: R rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from dovetail.interfaces.ops import DrawColumns, Ops, overridden_operations
from dovetail_devkit.case import Case
from dovetail_devkit.comparison import random_tensor
from dovetail_devkit.expectation import expect
from dovetail_devkit.ops.drawing_law import DrawParams, probabilities

if TYPE_CHECKING:
    import torch

NUM_DRAWS = 240
_MAX_DEVIATIONS = 4.0
_MIN_EXPECTED = 5.0
_PARAMS = {
    "temperature": DrawParams(temperature=0.7),
    "top-k": DrawParams(top_k=3),
    "top-k, top-p": DrawParams(temperature=1.5, top_k=6, top_p=0.7),
    "top-p": DrawParams(temperature=2.0, top_p=0.8),
    "min-p": DrawParams(min_p=0.3),
    "all truncations": DrawParams(temperature=2.5, min_p=0.25, top_k=6, top_p=0.75),
}
_COUNTED = ("temperature", "top-k", "all truncations")


def draw_cases(
    ops_cls: type[Ops],
    device: torch.device,
    *,
    dtypes: Iterable[str],
    num_draws: int = NUM_DRAWS,
) -> Iterator[Case]:
    """Yield the cases, or nothing if the class does not override `draw_tokens`.

    num_draws: the number of samples of each frequency test. It must be even.
    """
    if "draw_tokens" not in overridden_operations(ops_cls):
        return

    def make(dtype: str) -> _Bench:
        return _Bench(ops_cls, dtype, device)

    def run(check: Callable[[_Bench], None], dtype: str) -> None:
        check(make(dtype))

    def count(what: str) -> None:
        _check_counts(make("float32"), what, num_draws)

    for dtype in dtypes:
        for what, check in _OF_LOGITS.items():
            yield Case(name=f"draw, {what}, in {dtype}", run=partial(run, check, dtype))
    for what, check in _OF_NUMBERS.items():
        yield Case(name=f"draw, {what}", run=partial(run, check, "float32"))
    for what in _COUNTED:
        yield Case(name=f"draw frequencies, {what}", run=partial(count, what))


class _Bench:
    """Creates rows of logits and samples tokens from them with one provider."""

    def __init__(self, ops_cls: type[Ops], dtype: str, device: torch.device) -> None:
        self._ops: Any = ops_cls()
        self._dtype, self._device = dtype, device

    def logits(self, num_rows: int, vocab_size: int, seed: int = 1) -> torch.Tensor:
        """Return normal random logits with likely and unlikely tokens."""
        return random_tensor(
            (num_rows, vocab_size), dtype=self._dtype, device=self._device, seed=seed, scale=2.0
        )

    def draw(
        self,
        logits_RV: torch.Tensor,
        params: Sequence[DrawParams],
        seeds: Sequence[int],
        positions: Sequence[int],
    ) -> list[int]:
        """Sample a token for each row.

        Raises AssertionError for a result that is not a valid token.
        """
        columns = _columns(params, seeds, positions, logits_RV)
        copies = [getattr(columns, name).clone() for name in _NAMES]
        tokens = self._ops.draw_tokens(logits_RV.clone(), columns)
        name = str(tokens.dtype).removeprefix("torch.")
        expect(name == "int64", f"draw_tokens returns {name}; expected int64")
        expect(
            tuple(tokens.shape) == (len(logits_RV),),
            f"draw_tokens returns the shape {list(tokens.shape)}; expected {[len(logits_RV)]}",
        )
        for name, copy in zip(_NAMES, copies, strict=True):
            same = bool((getattr(columns, name) == copy).all())
            expect(same, f"draw_tokens must not change {name}")
        sampled: list[int] = tokens.tolist()
        inside = all(0 <= token < logits_RV.shape[1] for token in sampled)
        expect(
            inside,
            f"draw_tokens returns {sampled}; each token must be 0 to {logits_RV.shape[1] - 1}",
        )
        return sampled


_NAMES = ("temperature_R", "top_k_R", "top_p_R", "min_p_R", "seeds_R", "positions_R")


def _columns(
    params: Sequence[DrawParams],
    seeds: Sequence[int],
    positions: Sequence[int],
    logits_RV: torch.Tensor,
) -> DrawColumns:
    import torch

    def column(numbers: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(numbers, dtype=dtype).to(logits_RV.device)

    return DrawColumns(
        temperature_R=column([param.temperature for param in params], torch.float32),
        top_k_R=column([param.top_k or logits_RV.shape[1] for param in params], torch.int32),
        top_p_R=column([param.top_p for param in params], torch.float32),
        min_p_R=column([param.min_p for param in params], torch.float32),
        seeds_R=column(seeds, torch.int64),
        positions_R=column(positions, torch.int64),
    )


def _check_best(bench: _Bench) -> None:
    """Check that temperature 0 and truncation to one token sample the most likely token."""
    import torch

    logits_RV = bench.logits(6, 4999)
    best = logits_RV.max(dim=-1).values
    first = [int(torch.nonzero(row == top)[0]) for row, top in zip(logits_RV, best, strict=True)]
    logits_RV[0, first[0] + 1 :: 7] = best[0]  # the first of equal values is the best
    params = [DrawParams(temperature=0.0), DrawParams(top_k=1), DrawParams(top_p=1e-6)]
    params += [
        DrawParams(min_p=1.0),
        DrawParams(temperature=0.0, top_k=5),
        DrawParams(temperature=1e-3),
    ]
    # the most likely token is certain only if its logit is much larger than all other logits
    for r in (3, 5):
        logits_RV[r, first[r]] = best[r] + 1
    actual = bench.draw(logits_RV, params, range(6), range(6))
    expect(
        actual == first, f"draw_tokens returns {actual}; expected the most likely tokens {first}"
    )


def _check_kept(bench: _Bench) -> None:
    """Check that tokens that min-p, top-k or top-p exclude are not sampled."""
    logits_RV = bench.logits(1, 61, seed=3)
    for what, param in _PARAMS.items():
        probs = probabilities(logits_RV[0].tolist(), param)
        num_rows = 5
        rows = logits_RV.expand(num_rows, -1).contiguous()
        actual = bench.draw(rows, [param] * num_rows, range(num_rows), [9] * num_rows)
        invalid = sorted({token for token in actual if probs[token] == 0})
        expect(
            not invalid,
            f"draw_tokens returns {invalid}, but {what} must exclude this token ({param})",
        )


def _check_equals(bench: _Bench) -> None:
    """Check that truncation keeps the lowest ids if several logits are equal.

    Top-k keeps exactly k tokens, and top-p keeps the fewest tokens whose probabilities reach p.
    """
    import torch

    equal, params = (2, 5, 11, 12, 30), [DrawParams(temperature=10.0, top_k=3)] * 8
    params += [DrawParams(top_k=4)] * 10 + [DrawParams(temperature=1e-2, top_p=0.5)] * 10
    params += [DrawParams(top_k=1), DrawParams(temperature=1e-2, top_p=0.1)]
    num_rows = len(params)
    logits_RV = torch.full_like(bench.logits(num_rows, 37), -2.0)
    logits_RV[:, list(equal)] = 1.5
    logits_RV[:8, 20] = 2.5
    actual = bench.draw(logits_RV, params, range(num_rows), range(num_rows))
    # The first three of five equal tokens have more than half of the probability.
    for what, first, last, due in (
        ("top-k", 0, 8, {20, 2, 5}),
        ("top-k", 8, 18, {2, 5, 11, 12}),
        ("top-p", 18, 28, {2, 5, 11}),
    ):
        kept = set(actual[first:last])
        expect(
            kept <= due and len(kept) > 1,
            f"several logits are equal, and {what} keeps the tokens {kept}; expected {due}",
        )
    expect(
        actual[28:] == [2, 2],
        f"several tokens have equal logits, and truncation to one token returns {actual[28:]}; "
        f"expected 2, the first of them",
    )


def _check_rows_alone(bench: _Bench) -> None:
    """Check that the token of a row does not depend on other rows or on the row's index."""
    params = [*_PARAMS.values(), DrawParams(temperature=0.0), DrawParams()]
    logits_RV = bench.logits(len(params), 4999, seed=5)
    seeds = [(-7 if r % 2 else 1 << 40) * (r + 1) for r in range(len(params))]
    positions = [3 * r + 1 for r in range(len(params))]
    together = bench.draw(logits_RV, params, seeds, positions)
    again = bench.draw(logits_RV, params, seeds, positions)
    expect(
        together == again,
        f"two equal calls of draw_tokens return different tokens, {together} and {again}",
    )
    order = list(reversed(range(len(params))))
    turned = bench.draw(
        logits_RV[order].contiguous(),
        [params[r] for r in order],
        [seeds[r] for r in order],
        [positions[r] for r in order],
    )
    expect(
        turned == together[::-1],
        f"draw_tokens returns {together}, but {turned[::-1]} for the same rows in reversed order",
    )
    for r in (0, len(params) - 1):
        alone = bench.draw(logits_RV[r : r + 1], params[r : r + 1], [seeds[r]], [positions[r]])
        expect(
            alone == [together[r]],
            f"draw_tokens returns {alone} for row {r} alone, but {together[r]} with other rows",
        )


def _check_numbers(bench: _Bench) -> None:
    """Check that the sampled token depends on the seed and on the position."""
    num_rows = 12
    rows = bench.logits(1, 997, seed=8).expand(num_rows, -1).contiguous() * 0
    params, same = [DrawParams()] * num_rows, [5] * num_rows
    by_seed = bench.draw(rows, params, [r << 33 for r in range(num_rows)], same)
    by_low_seed = bench.draw(rows, params, range(num_rows), same)
    by_position = bench.draw(rows, params, same, range(num_rows))
    for what, actual in zip(
        ("seed above 32 bits", "seed", "position"), (by_seed, by_low_seed, by_position), strict=True
    ):
        # Twelve samples from 997 equal tokens have four equal pairs with a probability of 10^-8.
        expect(
            len(set(actual)) >= num_rows - 3,
            f"draw_tokens must depend on each {what}; rows that differ only in this value get "
            f"{actual}",
        )


def _check_invalid_rows(bench: _Bench) -> None:
    """Check that rows of -inf or NaN do not affect others, and that no -inf token is sampled."""
    import torch

    logits_RV = bench.logits(6, 50, seed=13)
    params = [DrawParams(), DrawParams(top_p=0.9), DrawParams(top_k=7), DrawParams(min_p=0.1)]
    params += [DrawParams(top_k=40), DrawParams(top_p=0.5)]
    seeds, positions = range(6), range(6)
    whole = bench.draw(logits_RV, params, seeds, positions)
    logits_RV[1] = -torch.inf
    logits_RV[3] = torch.nan
    logits_RV[5, 7] = torch.nan
    actual = bench.draw(logits_RV, params, seeds, positions)
    kept = [actual[r] == whole[r] for r in (0, 2, 4)]
    expect(
        all(kept),
        f"rows of -inf and NaN must not affect other rows: draw_tokens returns {actual} with such "
        f"rows, and {whole} without",
    )
    logits_RV[:] = -torch.inf
    logits_RV[:, 31] = -3.0
    actual = bench.draw(logits_RV, params, seeds, positions)
    expect(
        set(actual) == {31},
        f"draw_tokens returns {actual}; expected 31, the only token whose logit is not -inf",
    )
    none = bench.draw(logits_RV[:0], [], [], [])
    expect(none == [], f"draw_tokens returns {none} for no rows; expected no token")


def _check_counts(bench: _Bench, what: str, num_draws: int) -> None:
    """Compare the frequencies of sampled tokens with their probabilities, by a chi² test."""
    param, logits_RV = _PARAMS[what], bench.logits(1, 11, seed=21)
    probs = probabilities(logits_RV[0].tolist(), param)
    # Half of the samples differ by seed, half by position; all samples are independent.
    half = num_draws // 2
    seeds = [*range(half), *[77] * half]
    positions = [*[4] * half, *range(half)]
    rows = logits_RV.expand(num_draws, -1).contiguous()
    counts = Counter(bench.draw(rows, [param] * num_draws, seeds, positions))
    deviations = chi_squared([counts[token] for token in range(len(probs))], probs)
    expect(
        deviations < _MAX_DEVIATIONS,
        f"the frequencies of {num_draws} samples with {what}, {sorted(counts.items())}, are "
        f"{deviations:.1f} standard deviations from {[round(prob, 3) for prob in probs]}",
    )


def chi_squared(counts: Sequence[int], probs: Sequence[float]) -> float:
    """Return how many standard deviations chi² is above its mean.

    The result is inf if a token of probability 0 was sampled. Columns with an expected count below
    five are merged.
    """
    total = sum(counts)
    if any(count for count, prob in zip(counts, probs, strict=True) if prob == 0):
        return math.inf
    often = [i for i, prob in enumerate(probs) if prob * total >= _MIN_EXPECTED]
    pairs = [(float(counts[i]), probs[i] * total) for i in often]
    rest = sum(counts) - sum(count for count, _ in pairs), total - sum(due for _, due in pairs)
    if rest[1] > 1.0:
        pairs.append(rest)
    freedom = len(pairs) - 1
    statistic = sum((count - due) ** 2 / due for count, due in pairs)
    return (statistic - freedom) / math.sqrt(2 * freedom) if freedom else 0.0


_OF_LOGITS = {"most likely token": _check_best, "kept tokens": _check_kept}
_OF_NUMBERS = {
    "equal logits": _check_equals,
    "independent rows": _check_rows_alone,
    "seed and position": _check_numbers,
    "invalid rows": _check_invalid_rows,
}
