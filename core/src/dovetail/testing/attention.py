"""The conformance suite of the attention contract, for any backend on any device.

`check_backend` holds a backend against a dense float64 reference over everything that it claims.
It sees a backend only through the contract: a cache is filled by the backend itself, and its
layout stays opaque. Everything that a row does not own is NaN, so that a leak shows; before its
window, a row's table names such blocks, as if its own had been handed out again. Beyond the suite:
caches of another dtype than the model's, and features other than "sliding_window", "soft_cap",
"sinks" and "rotary". torch is imported within functions: the core lives without it.

Tolerances: |got - want| ≤ t · max(1, |want|), for values of order 1, with t of `TOLERANCES`.

Shape legend: T tokens of a step, R requests, M block-table width, B block size, H query heads,
K key-value heads, G query heads for each of them, D head size, Q queries and L positions of one
sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import ceil, prod
from typing import TYPE_CHECKING

from dovetail.interfaces.attention import (
    AttentionAsk,
    AttentionBackend,
    AttentionBatch,
    AttentionCapabilities,
    AttentionGroupContext,
    AttentionLayerContext,
    Rotation,
)
from dovetail.interfaces.kv_cache import DTYPE_BYTES
from dovetail.testing.attention_case import AttentionCase, standard_cases
from dovetail.testing.attention_reference import reference_attention
from dovetail.testing.case import Case, run_all
from dovetail.testing.comparison import TOLERANCES
from dovetail.testing.expectation import expect
from dovetail.testing.fake_ops import FakeOps
from dovetail.testing.rotary import far_apart, rotary_table, turned

if TYPE_CHECKING:
    import torch

__all__ = [
    "AttentionCase",
    "attention_cases",
    "check_backend",
    "check_case",
    "check_refusals",
    "reference_attention",
    "standard_cases",
]

_FEATURES = ("sliding_window", "soft_cap", "sinks", "cascade", "a_feature_nobody_has")


def check_backend(backend: type[AttentionBackend], device: torch.device) -> None:
    """Check all that `backend` claims, on `device`; raise AssertionError with what differs."""
    run_all(attention_cases(backend, device))


def attention_cases(backend: type[AttentionBackend], device: torch.device) -> Iterator[Case]:
    """Yield the suite's cases: refusals, and one for each point of the claimed matrix."""
    yield Case(name="refusals", run=partial(check_refusals, backend, device))
    for case in standard_cases(backend.capabilities):
        yield Case(name=str(case), run=partial(check_case, backend, case, device))


def check_refusals(backend: type[AttentionBackend], device: torch.device) -> None:
    """Check that what is claimed is not refused, and that what is not claimed is."""
    capabilities = backend.capabilities
    unknown = capabilities.dtypes - TOLERANCES.keys()
    expect(not unknown, f"no tolerance is stated for the claimed dtypes {sorted(unknown)}")
    for case in standard_cases(capabilities):
        ask = AttentionAsk(
            device_type=device.type,
            dtype=case.dtype,
            kv_cache_dtype=case.dtype,
            head_size=case.head_size,
            num_heads=case.num_heads,
            num_kv_heads=case.num_kv_heads,
            block_size=case.block_size,
            features=capabilities.features,
        )
        reasons = [*capabilities.refusals(ask), *backend.refusals(ask)]
        expect(not reasons, f"{backend.name} refuses what it claims: {ask}: {reasons}")
        for wrong in _asks_beyond(capabilities, ask):
            reasons = [*capabilities.refusals(wrong), *backend.refusals(wrong)]
            expect(bool(reasons), f"{backend.name} takes what it does not claim: {wrong}")


def _asks_beyond(capabilities: AttentionCapabilities, ask: AttentionAsk) -> Iterator[AttentionAsk]:
    yield replace(ask, dtype="float8_nobody")
    yield replace(ask, kv_cache_dtype="float8_nobody")
    for feature in _FEATURES:
        if feature not in capabilities.features:
            yield replace(ask, features=ask.features | {feature})
    if capabilities.device_types:
        yield replace(ask, device_type="abacus")
    if capabilities.head_sizes:
        yield replace(ask, head_size=max(capabilities.head_sizes) + 1)
    if capabilities.block_size_multiple > 1:
        yield replace(ask, block_size=capabilities.block_size_multiple + 1)


def check_case(backend: type[AttentionBackend], case: AttentionCase, device: torch.device) -> None:
    """Check one case, on `device`; raise AssertionError with what differs.

    Three steps over one cache: the contexts, the case's runs, and one more token of every row,
    which reads what the runs have written. One more row is there that the runs leave out.
    """
    rows = _Rows(backend, case, device)
    contexts = [context for context, _ in case.runs]
    ends = [sum(run) for run in case.runs]
    bystander = len(case.runs)
    length = case.block_size + 2
    rows.step("contexts", [(r, 0, n) for r, n in [*enumerate(contexts), (bystander, length)] if n])
    rows.step("runs", [(r, contexts[r], n) for r, (_, n) in enumerate(case.runs)])
    rows.step("one more each", [(r, n, 1) for r, n in [*enumerate(ends), (bystander, length)]])


class _Rows:
    """The rows of a case: their random q, k, v, what is to come out, their blocks, the cache."""

    def __init__(
        self, backend: type[AttentionBackend], case: AttentionCase, device: torch.device
    ) -> None:
        import torch

        self.case = case
        self.device = device
        self.dtype: torch.dtype = getattr(torch, case.dtype)
        generator = torch.Generator().manual_seed(case.seed)
        lengths = [context + query + 1 for context, query in case.runs] + [case.block_size + 3]
        self._make_blocks([ceil(length / case.block_size) for length in lengths], generator)
        self.sinks: torch.Tensor | None = None
        if case.sinks:  # of the order of the scores, and some above all of them
            self.sinks = 2 * torch.randn(case.num_heads, generator=generator)
        num_heads = case.num_heads + 2 * case.num_kv_heads
        self.qkv = [
            torch.randn((n, num_heads, case.head_size), generator=generator).to(self.dtype)
            for n in lengths
        ]
        self.want = [
            reference_attention(
                *self._turned(qkv),
                scale=case.scale,
                sliding_window=case.sliding_window,
                soft_cap=case.soft_cap,
                sinks_H=self.sinks,
            )
            for qkv in self.qkv
        ]
        self._make_parts(backend, lengths)

    def _make_blocks(self, counts: Sequence[int], generator: torch.Generator) -> None:
        """Deal out blocks in random order; block 0 and two more belong to nobody."""
        import torch

        self.num_blocks = sum(counts) + 3
        free = (torch.randperm(self.num_blocks - 1, generator=generator) + 1).tolist()
        self.blocks = [[free.pop() for _ in range(count)] for count in counts]
        self.foreign = free.pop()

    def _make_parts(self, backend: type[AttentionBackend], lengths: Sequence[int]) -> None:
        import torch

        case = self.case
        shape = backend.kv_cache_shape(self.num_blocks, case.spec)
        got_bytes = prod(shape) * DTYPE_BYTES[case.dtype]
        want_bytes = self.num_blocks * case.spec.page_size_bytes
        expect(
            got_bytes == want_bytes,
            f"{case!r}: kv_cache_shape {shape} takes {got_bytes} bytes; {want_bytes} are due",
        )
        self.cache = torch.full(shape, float("nan"), dtype=self.dtype, device=self.device)
        self.builder = backend.create_builder(
            AttentionGroupContext(
                spec=case.spec,
                device=self.device,
                max_num_seqs=len(lengths),
                max_num_batched_tokens=sum(lengths),
                max_model_len=max(lengths),
            )
        )
        self.layer = backend.create_layer(
            AttentionLayerContext(
                layer_name="layers.0.attn",
                num_heads=case.num_heads,
                num_kv_heads=case.num_kv_heads,
                head_size=case.head_size,
                scale=case.scale,
                dtype=self.dtype,
                device=self.device,
                sliding_window=case.sliding_window,
                soft_cap=case.soft_cap,
                sinks=None if self.sinks is None else self.sinks.to(self.device),
            )
        )

    def _split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return views of q, k and v, strided as those of a fused projection are."""
        num_heads, num_kv_heads = self.case.num_heads, self.case.num_kv_heads
        q, k, v = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        return q, k, v

    def _turned(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return all of a row's q, k and v as attention is to see them; float64 if turned."""
        import torch

        q, k, v = self._split(qkv)
        if not self.case.rotary_size:
            return q, k, v
        table_PR = rotary_table(self.case.rotary_size, torch.device("cpu")).double()
        cos_sin_TR = table_PR[far_apart(0, len(qkv))]
        return turned(q.double(), cos_sin_TR), turned(k.double(), cos_sin_TR), v

    def _rotation(self, runs: Sequence[tuple[int, int, int]]) -> tuple[Rotation, ...]:
        """Return what the layer is given besides, in a step of such runs."""
        import torch

        if not self.case.rotary_size:
            return ()
        positions = [position for _, first, n in runs for position in far_apart(first, n)]
        table_PR = rotary_table(self.case.rotary_size, self.device)
        positions_T = torch.tensor(positions, device=self.device)
        return (Rotation(ops=FakeOps(), positions_T=positions_T, cos_sin_PR=table_PR),)

    def step(self, name: str, runs: Sequence[tuple[int, int, int]]) -> None:
        """Do and check one step of runs (row, first position, number of tokens)."""
        import torch

        what = f"{self.case!r}, step {name!r}"
        batch = self._batch(runs)
        tensors = [
            batch.query_start_R1,
            batch.seq_lens_R,
            batch.block_table_RM,
            batch.slot_mapping_T,
            torch.cat([self.qkv[row][first : first + n] for row, first, n in runs]).to(self.device),
        ]
        copies = [tensor.clone() for tensor in tensors]
        q, k, v = self._split(tensors[-1])
        out_THD = torch.full(q.shape, float("nan"), dtype=self.dtype, device=self.device)
        cache_before = self.cache.clone()
        metadata = self.builder.build(batch)
        self.layer.forward(q, k, v, self.cache, metadata, out_THD, *self._rotation(runs))
        for label, tensor, copy in zip(
            ("query_start", "seq_lens", "block_table", "slot_mapping", "q, k or v"),
            tensors,
            copies,
            strict=True,
        ):
            expect(torch.equal(tensor, copy), f"{what}: {label} was changed; it is only read")
        written = ~cache_before.isnan()
        expect(
            torch.equal(self.cache[written], cache_before[written]),
            f"{what}: the cache of earlier tokens was changed",
        )
        got = out_THD.to("cpu").split([n for _, _, n in runs])
        for (row, first, n), got_QHD in zip(runs, got, strict=True):
            place = f"{what}, row {row} with {n} tokens from position {first}"
            self._compare(place, got_QHD, self.want[row][first : first + n])

    def _batch(self, runs: Sequence[tuple[int, int, int]]) -> AttentionBatch:
        import torch

        size = self.case.block_size
        width = max(len(blocks) for blocks in self.blocks) + 2
        table = [self._table(row, first, width) for row, first, _ in runs]
        slots = [
            self.blocks[row][position // size] * size + position % size
            for row, first, n in runs
            for position in range(first, first + n)
        ]
        query_lens = tuple(n for _, _, n in runs)
        seq_lens = tuple(first + n for _, first, n in runs)
        starts = [sum(query_lens[:i]) for i in range(len(runs) + 1)]
        return AttentionBatch(
            query_start_R1=torch.tensor(starts, dtype=torch.int32, device=self.device),
            seq_lens_R=torch.tensor(seq_lens, dtype=torch.int32, device=self.device),
            block_table_RM=torch.tensor(table, dtype=torch.int32, device=self.device),
            slot_mapping_T=torch.tensor(slots, dtype=torch.int64, device=self.device),
            query_lens=query_lens,
            seq_lens=seq_lens,
        )

    def _table(self, row: int, first: int, width: int) -> list[int]:
        """Return a row's table for a run from position `first`; what left the window is foreign."""
        blocks, window = self.blocks[row], self.case.sliding_window
        num_left = max(0, first - window + 1) // self.case.block_size if window else 0
        return [self.foreign] * num_left + blocks[num_left:] + [0] * (width - len(blocks))

    def _compare(self, place: str, got: torch.Tensor, want: torch.Tensor) -> None:
        tolerance = TOLERANCES[self.case.dtype]
        error = (got.double() - want).abs() / want.abs().clamp(min=1.0)
        # A NaN is the worst of errors, but no comparison finds it too large.
        error = error.nan_to_num(nan=float("inf"))
        worst = int(error.argmax())
        token, rest = divmod(worst, want[0].numel())
        head, element = divmod(rest, want.shape[2])
        off = float(error.flatten()[worst])
        expect(
            off <= tolerance,
            f"{place}: token {token}, head {head}, element {element} is "
            f"{float(got.flatten()[worst])}; {float(want.flatten()[worst])} is right, "
            f"and off by {tolerance} at most ({self.case.dtype})",
        )
