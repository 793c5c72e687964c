"""Cases of the attention suite for metadata builders, and for features that need several steps.

An engine has one builder for each KV-cache group, which serves every step. A backend that claims
"batch_invariant" gives bitwise equal results for a token in any batch and for any chunks of its
prompt. A backend that claims "supports_advance" can advance its last metadata by one token. A
backend that claims "graphs" has metadata that remains valid for later lengths. torch is imported
within functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from math import ceil
from typing import TYPE_CHECKING, Any, cast

from dovetail.interfaces.attention import KV_LAYER_SCALES, AttentionBackend, AttentionBatch
from dovetail_devkit.attention.bidirectional import check_bidirectional
from dovetail_devkit.attention.case import LARGEST, AttentionCase
from dovetail_devkit.attention.rows import AttentionRows, Run
from dovetail_devkit.case import Case
from dovetail_devkit.expectation import SkipCase, checking, expect

if TYPE_CHECKING:
    import torch

Check = Callable[[type[AttentionBackend], AttentionCase, "torch.device"], None]

NUM_ROWS = 3
NUM_STEPS = 4
LONG = 300
"""Length of a long row in tokens; backends split rows of this length into parts."""

EXERCISED = frozenset(
    {
        "sliding_window",
        "soft_cap",
        "sinks",
        "alibi",
        "rotary",
        "padded_pages",
        "batch_invariant",
        "supports_advance",
        "graphs",
        "kv_layer_scales",
        "mla",
        "bidirectional",
    }
)
"""The features for which the suite has cases."""


def claim_cases(backend: type[AttentionBackend], device: torch.device) -> Iterator[Case]:
    """Yield the cases of metadata builders, and of claimed features that need several steps."""
    capabilities = backend.capabilities
    multiple, sizes = capabilities.block_size_multiple, sorted(capabilities.head_sizes) or [32]
    base = AttentionCase(runs=(), block_size=multiple * ceil(16 / multiple), head_size=sizes[0])
    checks = [
        (name, check)
        for name, (feature, check) in _CHECKS.items()
        if not feature or feature in capabilities.features
    ]
    others = sorted(capabilities.kv_cache_dtypes - capabilities.dtypes)
    caches = [("", False), *((cache_dtype, False) for cache_dtype in others)]
    if KV_LAYER_SCALES in capabilities.features:
        caches += [(cache_dtype, True) for cache_dtype in others if cache_dtype in LARGEST]
    for dtype, (cache_dtype, has_scales) in product(sorted(capabilities.dtypes), caches):
        if not cache_dtype and dtype not in (capabilities.kv_cache_dtypes or {dtype}):
            continue
        case = replace(base, dtype=dtype, cache_dtype=cache_dtype, has_layer_scales=has_scales)
        what = f"{case.spec.dtype}{' with per-layer scales' if has_scales else ''} under {dtype}"
        for name, check in checks:
            run = partial(_judge, name, partial(_check_claim, check, backend, case, device))
            yield Case(name=f"{name}, {what}", run=run)
    for feature in sorted(capabilities.features - EXERCISED):
        yield Case(name=f"the feature {feature}", run=partial(_leave_out, feature))


def _judge(name: str, check: Callable[[], None]) -> None:
    with checking(repr(name)):
        check()


def _check_claim(
    check: Check, backend: type[AttentionBackend], case: AttentionCase, device: torch.device
) -> None:
    """Run `check`, unless the backend rejects the case on this machine."""
    reasons = backend.refusals(case.requirements(device.type))
    if reasons:
        raise SkipCase("; ".join(reasons))
    check(backend, case, device)


def _leave_out(feature: str) -> None:
    raise SkipCase(f"the suite has no case for the feature {feature!r}; write a test for it")


def _check_builds(
    backend: type[AttentionBackend], case: AttentionCase, device: torch.device
) -> None:
    """Check one builder over many steps of one shape, with new and with reused tensors."""
    length = case.block_size + 3
    rows = AttentionRows(backend, replace(case, runs=((length, NUM_STEPS),) * NUM_ROWS), device)
    everyone = range(NUM_ROWS)
    rows.step("prompts", [(row, 0, length) for row in everyone])
    kept: AttentionBatch | None = None
    for step in range(NUM_STEPS):
        order = [(row + step) % NUM_ROWS for row in everyone]
        runs = [(row, length + step, 1) for row in order]
        batch = rows.batch(runs)
        kept = batch if kept is None or step % 2 else _refill(kept, batch)
        rows.step(f"build {step + 2}", runs, batch=kept)
    # Only block tables and slots differ: other rows have the same lengths.
    for pair in ((0, 1), (1, 2), (2, 0)):
        runs = [(row, length + NUM_STEPS, 1) for row in pair]
        rows.step("other blocks", runs)


def _check_two_builders(
    backend: type[AttentionBackend], case: AttentionCase, device: torch.device
) -> None:
    """Check the builders of two groups, both built before either group's layers run."""
    length = case.block_size + 3
    wide = replace(case, block_size=2 * case.block_size)
    groups = [
        AttentionRows(backend, replace(item, runs=((length, 1),) * 2, seed=seed), device)
        for seed, item in enumerate((case, wide))
    ]
    for first, n in ((0, length), (length, 1)):
        runs = [(0, first, n), (1, first, n)]
        batches = [rows.batch(runs) for rows in groups]
        built = [rows.builder.build(batch) for rows, batch in zip(groups, batches, strict=True)]
        for index, (rows, batch, metadata) in enumerate(zip(groups, batches, built, strict=True)):
            what = f"The layer is in group {index} of two groups, in the case {rows.case}."
            rows.expect_right(what, runs, rows.attend(runs, batch, metadata, what))


def _check_order(
    backend: type[AttentionBackend], case: AttentionCase, device: torch.device
) -> None:
    """Check batches of requests around the `reorder_threshold`, in every allowed order."""
    size = case.block_size
    first = AttentionRows(backend, replace(case, runs=((size, 1),)), device)
    threshold = first.builder.reorder_threshold
    expect(threshold >= 0, f"reorder_threshold is {threshold}; expected 0 or more")
    lengths = [1, *{1, threshold, threshold + 1} - {0}, 2, 3 * size]
    contexts = [(5 * size + index, 0, size - 1)[index % 3] for index in range(len(lengths))]
    case = replace(case, runs=tuple(zip(contexts, lengths, strict=True)))
    runs = [(row, context, n) for row, (context, n) in enumerate(case.runs)]
    orders = {
        "short runs first": sorted(runs, key=lambda run: run[2]),
        "long runs first": sorted(runs, key=lambda run: -run[2]),
        "short and long runs alternate": [*runs[::2], *runs[1::2]],
    }
    for name, order in orders.items():
        rows = AttentionRows(backend, case, device)
        rows.step("contexts", [(row, 0, n) for row, n in enumerate(contexts) if n])
        rows.step(f"{name}, reorder_threshold {threshold}", order)


def _check_invariance(
    backend: type[AttentionBackend], case: AttentionCase, device: torch.device
) -> None:
    """Check that a request has bitwise equal results alone, in chunks, in batches and reordered."""
    import torch

    lengths = (LONG, case.block_size + 1, 7)
    case = replace(case, runs=tuple((0, length) for length in lengths))

    def attend(steps: Sequence[Sequence[Run]]) -> dict[int, torch.Tensor]:
        rows = AttentionRows(backend, case, device)
        outputs: dict[int, list[torch.Tensor]] = {}
        for runs in map(rows.in_order, steps):
            batch = rows.batch(runs)
            actual = rows.attend(runs, batch, rows.builder.build(batch), f"The case is {case}.")
            for (row, _, _), out_QHD in zip(runs, actual, strict=True):
                outputs.setdefault(row, []).append(out_QHD)
        return {row: torch.cat(parts) for row, parts in outputs.items()}

    alone = {row: attend([[(row, 0, n)]])[row] for row, n in enumerate(lengths)}
    for how, steps in _cuts(lengths).items():
        for row, actual in attend(steps).items():
            differs = (actual != alone[row]).flatten(1).any(1).nonzero().flatten().tolist()
            expect(
                not differs,
                f"batch_invariant is claimed, but the positions {differs[:3]} of a row of "
                f"{lengths[row]} tokens have results that differ bitwise from those in a step "
                f"with only this row. {how}\nThe case is {case}.",
            )


def _cuts(lengths: Sequence[int]) -> Mapping[str, list[list[Run]]]:
    """Return several ways to divide the same requests into steps, by description."""
    whole = [(row, 0, n) for row, n in enumerate(lengths)]
    return {
        "All rows ran in one step.": [whole],
        "All rows ran in one step, in reversed order.": [whole[::-1]],
        "The last token of each row ran in a separate step.": [
            [(row, 0, n - 1) for row, _, n in whole],
            [(row, n - 1, 1) for row, _, n in whole],
        ],
        "The rows ran in chunks.": [
            [(0, 0, 7), (1, 0, 3)],
            [(2, 0, 7), (0, 7, 250)],
            [(0, 257, 1), (1, 3, lengths[1] - 3)],
            [(0, 258, lengths[0] - 258)],
        ],
    }


def _check_counting(
    backend: type[AttentionBackend], case: AttentionCase, device: torch.device
) -> None:
    """Check that advanced metadata equals the metadata of the next step."""
    length = case.block_size + 3
    rows = AttentionRows(backend, replace(case, runs=((length, NUM_STEPS),) * NUM_ROWS), device)
    rows.step("prompts", [(row, 0, length) for row in range(NUM_ROWS)])
    runs = [(row, length, 1) for row in range(NUM_ROWS)]
    batch = rows.batch(runs)
    metadata = rows.builder.build(batch)
    advance = cast("Callable[[], None]", getattr(rows.builder, "advance", None))
    expect(callable(advance), "supports_advance is claimed, but the builder has no advance()")
    for step in range(NUM_STEPS):
        what = f"advance() was called {step} times after the last build, in the case {case}."
        rows.expect_right(what, runs, rows.attend(runs, batch, metadata, what))
        runs = [(row, first + 1, 1) for row, first, _ in runs]
        _refill(batch, rows.batch(runs))
        advance()


def _check_graphs(
    backend: type[AttentionBackend], case: AttentionCase, device: torch.device
) -> None:
    """Check that graph metadata of two sizes stays valid in later steps with other lengths."""
    length = case.block_size + 3
    rows = AttentionRows(backend, replace(case, runs=((length, NUM_STEPS),) * NUM_ROWS), device)
    rows.step("prompts", [(row, 0, length) for row in range(NUM_ROWS)])
    builder: Any = rows.builder
    for name in ("build_for_graph", "update_for_replay"):
        expect(callable(getattr(builder, name, None)), f"graphs is claimed, but there is no {name}")
    longest = length + NUM_STEPS + 1
    graphs = {}
    for num_runs in (1, NUM_ROWS):
        batch = rows.batch([(row, length, 1) for row in range(num_runs)])
        upper = replace(batch, seq_lens=(longest,) * num_runs)
        graphs[num_runs] = (batch, builder.build_for_graph(upper))
    for step in range(NUM_STEPS):
        for first, num_runs in ((0, NUM_ROWS), (step % NUM_ROWS, 1)):
            batch, metadata = graphs[num_runs]
            runs = [((row + first) % NUM_ROWS, length + step, 1) for row in range(num_runs)]
            batch = _refill(batch, rows.batch(runs))
            builder.update_for_replay(metadata, batch)
            what = f"Step {step} uses build_for_graph for {num_runs} runs, in the case {case}."
            rows.expect_right(what, runs, rows.attend(runs, batch, metadata, what))
        rows.step("an eager step", [(row, length + step, 1) for row in range(NUM_ROWS)])


def _refill(target: AttentionBatch | None, new: AttentionBatch) -> AttentionBatch:
    """Copy `new` into the tensors of `target`, as a runner with persistent buffers does."""
    if target is None:
        return new
    for name in ("query_start_R1", "seq_lens_R", "block_table_RM", "slot_mapping_T"):
        getattr(target, name).copy_(getattr(new, name))
    return replace(target, query_lens=new.query_lens, seq_lens=new.seq_lens)


_CHECKS: Mapping[str, tuple[str, Check]] = {
    "one builder serves many steps": ("", _check_builds),
    "two groups have separate builders": ("", _check_two_builders),
    "short and long runs are in one batch": ("", _check_order),
    "batch_invariant": ("batch_invariant", _check_invariance),
    "supports_advance": ("supports_advance", _check_counting),
    "graphs": ("graphs", _check_graphs),
    "bidirectional": ("bidirectional", check_bidirectional),
}
"""Map of case name to the feature that must be claimed ("" for none) and the check."""
