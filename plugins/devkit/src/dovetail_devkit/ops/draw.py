"""The conformance cases of `draw_tokens`, for providers that override it, beside `ops.py`.

They check which tokens can be drawn, how often, and that a row's token depends on that row only.
Random numbers differ by provider, so draws are compared with probabilities (`drawing_law`), not
with draws of another provider. torch is imported within functions.

Legend: R rows, V vocabulary.
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
_MOST_DEVIATIONS = 4.0
_LEAST_EXPECTED = 5.0
_WISHES = {
    "temperature": DrawParams(temperature=0.7),
    "top-k": DrawParams(top_k=3),
    "top-k and top-p": DrawParams(temperature=1.5, top_k=6, top_p=0.7),
    "top-p": DrawParams(temperature=2.0, top_p=0.8),
    "min-p": DrawParams(min_p=0.3),
    "min-p, top-k and top-p": DrawParams(temperature=2.5, min_p=0.25, top_k=6, top_p=0.75),
}
_COUNTED = ("temperature", "top-k", "min-p, top-k and top-p")


def draw_cases(
    ops_cls: type[Ops],
    device: torch.device,
    *,
    dtypes: Iterable[str],
    num_draws: int = NUM_DRAWS,
) -> Iterator[Case]:
    """Yield the cases; none if the class does not override `draw_tokens`.

    num_draws: number of draws whose frequencies are compared; even.
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
        yield Case(name=f"draw, frequencies by {what}", run=partial(count, what))


class _Bench:
    """Makes rows of logits and draws from them with one provider."""

    def __init__(self, ops_cls: type[Ops], dtype: str, device: torch.device) -> None:
        self._ops: Any = ops_cls()
        self._dtype, self._device = dtype, device

    def logits(self, num_rows: int, vocab_size: int, seed: int = 1) -> torch.Tensor:
        """Return normal logits, wide enough that some tokens are likely and others are not."""
        return random_tensor(
            (num_rows, vocab_size), dtype=self._dtype, device=self._device, seed=seed, scale=2.0
        )

    def draw(
        self,
        logits_RV: torch.Tensor,
        wishes: Sequence[DrawParams],
        seeds: Sequence[int],
        positions: Sequence[int],
    ) -> list[int]:
        """Return the drawn tokens of rows; raise if they are not valid tokens."""
        columns = _columns(wishes, seeds, positions, logits_RV)
        copies = [getattr(columns, name).clone() for name in _NAMES]
        tokens = self._ops.draw_tokens(logits_RV.clone(), columns)
        name = str(tokens.dtype).removeprefix("torch.")
        expect(name == "int64", f"draw_tokens returns {name}, expected int64")
        expect(
            tuple(tokens.shape) == (len(logits_RV),),
            f"draw_tokens returns the shape {list(tokens.shape)} for {len(logits_RV)} rows",
        )
        for name, copy in zip(_NAMES, copies, strict=True):
            same = bool((getattr(columns, name) == copy).all())
            expect(same, f"draw_tokens changes {name}, which is read-only")
        drawn: list[int] = tokens.tolist()
        inside = all(0 <= token < logits_RV.shape[1] for token in drawn)
        expect(inside, f"draw_tokens returns {drawn}: not all are below {logits_RV.shape[1]}")
        return drawn


_NAMES = ("temperature_R", "top_k_R", "top_p_R", "min_p_R", "seeds_R", "positions_R")


def _columns(
    wishes: Sequence[DrawParams],
    seeds: Sequence[int],
    positions: Sequence[int],
    logits_RV: torch.Tensor,
) -> DrawColumns:
    import torch

    def column(numbers: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(numbers, dtype=dtype).to(logits_RV.device)

    return DrawColumns(
        temperature_R=column([wish.temperature for wish in wishes], torch.float32),
        top_k_R=column([wish.top_k or logits_RV.shape[1] for wish in wishes], torch.int32),
        top_p_R=column([wish.top_p for wish in wishes], torch.float32),
        min_p_R=column([wish.min_p for wish in wishes], torch.float32),
        seeds_R=column(seeds, torch.int64),
        positions_R=column(positions, torch.int64),
    )


def _check_best(bench: _Bench) -> None:
    """Check that temperature 0 and cuts to one token take the best token, beside rows that draw."""
    import torch

    logits_RV = bench.logits(6, 4999)
    best = logits_RV.max(dim=-1).values
    first = [int(torch.nonzero(row == top)[0]) for row, top in zip(logits_RV, best, strict=True)]
    logits_RV[0, first[0] + 1 :: 7] = best[0]  # of equal values the first one counts
    wishes = [DrawParams(temperature=0.0), DrawParams(top_k=1), DrawParams(top_p=1e-6)]
    wishes += [
        DrawParams(min_p=1.0),
        DrawParams(temperature=0.0, top_k=5),
        DrawParams(temperature=1e-3),
    ]
    for r in (3, 5):  # certain only because the best logit is far ahead
        logits_RV[r, first[r]] = best[r] + 1
    got = bench.draw(logits_RV, wishes, range(6), range(6))
    expect(got == first, f"rows took {got}; expected the best tokens {first}")


def _check_staying(bench: _Bench) -> None:
    """Check that only tokens that min-p, top-k and top-p keep are drawn."""
    logits_RV = bench.logits(1, 61, seed=3)
    for what, wish in _WISHES.items():
        probs = probabilities(logits_RV[0].tolist(), wish)
        num_rows = 5
        rows = logits_RV.expand(num_rows, -1).contiguous()
        got = bench.draw(rows, [wish] * num_rows, range(num_rows), [9] * num_rows)
        wrong = sorted({token for token in got if probs[token] == 0})
        expect(not wrong, f"tokens {wrong} are drawn though {what} ({wish}) drops them")


def _check_equals(bench: _Bench) -> None:
    """Check that of equal logits the lowest ids are kept: exactly k, or the fewest that reach p."""
    import torch

    equal, wishes = (2, 5, 11, 12, 30), [DrawParams(temperature=10.0, top_k=3)] * 8
    wishes += [DrawParams(top_k=4)] * 10 + [DrawParams(temperature=1e-2, top_p=0.5)] * 10
    wishes += [DrawParams(top_k=1), DrawParams(temperature=1e-2, top_p=0.1)]
    num_rows = len(wishes)
    logits_RV = torch.full_like(bench.logits(num_rows, 37), -2.0)
    logits_RV[:, list(equal)] = 1.5
    logits_RV[:8, 20] = 2.5
    got = bench.draw(logits_RV, wishes, range(num_rows), range(num_rows))
    # The first three of five equal tokens reach half of the mass.
    for what, first, last, due in (
        ("top-k with one better token", 0, 8, {20, 2, 5}),
        ("top-k", 8, 18, {2, 5, 11, 12}),
        ("top-p", 18, 28, {2, 5, 11}),
    ):
        kept = set(got[first:last])
        expect(
            kept <= due and len(kept) > 1, f"{what} among equal logits keeps {kept}; expected {due}"
        )
    expect(got[28:] == [2, 2], f"cuts to the first of equal tokens give {got[28:]}; expected 2")


def _check_rows_alone(bench: _Bench) -> None:
    """Check that a row's token does not depend on other rows or on its place."""
    wishes = [*_WISHES.values(), DrawParams(temperature=0.0), DrawParams()]
    logits_RV = bench.logits(len(wishes), 4999, seed=5)
    seeds = [(-7 if r % 2 else 1 << 40) * (r + 1) for r in range(len(wishes))]
    positions = [3 * r + 1 for r in range(len(wishes))]
    together = bench.draw(logits_RV, wishes, seeds, positions)
    again = bench.draw(logits_RV, wishes, seeds, positions)
    expect(together == again, f"the same draw returns {together}, then {again}")
    order = list(reversed(range(len(wishes))))
    turned = bench.draw(
        logits_RV[order].contiguous(),
        [wishes[r] for r in order],
        [seeds[r] for r in order],
        [positions[r] for r in order],
    )
    expect(turned == together[::-1], f"reordered rows draw {turned[::-1]}, not {together}")
    for r in (0, len(wishes) - 1):
        alone = bench.draw(logits_RV[r : r + 1], wishes[r : r + 1], [seeds[r]], [positions[r]])
        expect(
            alone == [together[r]],
            f"row {r} draws {alone} alone, but {together[r]} beside other rows",
        )


def _check_numbers(bench: _Bench) -> None:
    """Check that another seed or another position gives another draw."""
    num_rows = 12
    rows = bench.logits(1, 997, seed=8).expand(num_rows, -1).contiguous() * 0
    wishes, same = [DrawParams()] * num_rows, [5] * num_rows
    by_seed = bench.draw(rows, wishes, [r << 33 for r in range(num_rows)], same)
    by_low_seed = bench.draw(rows, wishes, range(num_rows), same)
    by_position = bench.draw(rows, wishes, same, range(num_rows))
    for what, got in zip(
        ("seed's upper half", "seed", "position"), (by_seed, by_low_seed, by_position), strict=True
    ):
        # With 997 equal tokens, twelve draws have more than three pairs once in 10^8 times.
        expect(len(set(got)) >= num_rows - 3, f"another {what} does not change the draw: {got}")


def _check_odd_rows(bench: _Bench) -> None:
    """Check that rows without a valid token do not affect others, and that -inf is not drawn."""
    import torch

    logits_RV = bench.logits(6, 50, seed=13)
    wishes = [DrawParams(), DrawParams(top_p=0.9), DrawParams(top_k=7), DrawParams(min_p=0.1)]
    wishes += [DrawParams(top_k=40), DrawParams(top_p=0.5)]
    seeds, positions = range(6), range(6)
    whole = bench.draw(logits_RV, wishes, seeds, positions)
    logits_RV[1] = -torch.inf
    logits_RV[3] = torch.nan
    logits_RV[5, 7] = torch.nan
    got = bench.draw(logits_RV, wishes, seeds, positions)
    kept = [got[r] == whole[r] for r in (0, 2, 4)]
    expect(all(kept), f"beside rows of -inf and NaN other rows draw {got}; without them {whole}")
    logits_RV[:] = -torch.inf
    logits_RV[:, 31] = -3.0
    got = bench.draw(logits_RV, wishes, seeds, positions)
    expect(set(got) == {31}, f"rows with one token above -inf draw {got}, not 31")
    none = bench.draw(logits_RV[:0], [], [], [])
    expect(none == [], f"a call without rows returns {none}")


def _check_counts(bench: _Bench, what: str, num_draws: int) -> None:
    """Compare token frequencies with probabilities: chi² of many draws from the same logits."""
    wish, logits_RV = _WISHES[what], bench.logits(1, 11, seed=21)
    probs = probabilities(logits_RV[0].tolist(), wish)
    # Half by seed, half by position: both give independent draws.
    half = num_draws // 2
    seeds = [*range(half), *[77] * half]
    positions = [*[4] * half, *range(half)]
    rows = logits_RV.expand(num_draws, -1).contiguous()
    counts = Counter(bench.draw(rows, [wish] * num_draws, seeds, positions))
    deviations = chi_squared([counts[token] for token in range(len(probs))], probs)
    expect(
        deviations < _MOST_DEVIATIONS,
        f"{num_draws} draws by {what} give {sorted(counts.items())}, which is {deviations:.1f} "
        f"standard deviations from {[round(prob, 3) for prob in probs]}",
    )


def chi_squared(counts: Sequence[int], probs: Sequence[float]) -> float:
    """Return by how many standard deviations chi² is above its mean; inf for impossible tokens.

    Columns with an expected count below five are merged.
    """
    total = sum(counts)
    if any(count for count, prob in zip(counts, probs, strict=True) if prob == 0):
        return math.inf
    often = [i for i, prob in enumerate(probs) if prob * total >= _LEAST_EXPECTED]
    pairs = [(float(counts[i]), probs[i] * total) for i in often]
    rest = sum(counts) - sum(count for count, _ in pairs), total - sum(due for _, due in pairs)
    if rest[1] > 1.0:
        pairs.append(rest)
    freedom = len(pairs) - 1
    statistic = sum((count - due) ** 2 / due for count, due in pairs)
    return (statistic - freedom) / math.sqrt(2 * freedom) if freedom else 0.0


_OF_LOGITS = {"the best token": _check_best, "what stays": _check_staying}
_OF_NUMBERS = {
    "equals": _check_equals,
    "rows alone": _check_rows_alone,
    "seeds and positions": _check_numbers,
    "odd rows": _check_odd_rows,
}
