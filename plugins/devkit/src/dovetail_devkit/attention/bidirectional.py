"""The attention suite's case for "bidirectional" attention: whole prompts, without a cache.

Prompts of several lengths are computed in one step and compared with the reference, with heads and
windows of several sizes. A backend that also claims "batch_invariant" must give bitwise equal
results for a prompt alone and in any batch. torch is imported within functions.

Dimensions: T tokens of the step, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from dovetail.interfaces.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionGroupContext,
    AttentionLayerContext,
)
from dovetail_devkit.attention.case import AttentionCase
from dovetail_devkit.attention.reference import reference_attention
from dovetail_devkit.expectation import expect

if TYPE_CHECKING:
    import torch

LENGTHS = (7, 1, 40, 16, 300, 40)
"""The lengths of the prompts of a step. Backends split the long prompt into parts."""
WINDOWS = (1, 5, 32, 1000)
HEADS = ((8, 2), (3, 3), (5, 1))
"""Numbers of query heads and of key-value heads."""


def check_bidirectional(
    backend: type[AttentionBackend], case: AttentionCase, device: torch.device
) -> None:
    """Check prompts of `LENGTHS` in one step. Raise AssertionError with the first difference."""
    capabilities = backend.capabilities
    sizes = sorted(capabilities.head_sizes) or [64, 80]
    windows = WINDOWS if "sliding_window" in capabilities.features else ()
    cases = [
        *(replace(case, num_heads=heads, num_kv_heads=kv_heads) for heads, kv_heads in HEADS),
        *(replace(case, head_size=size) for size in (*sizes[1:4], sizes[-1])),
        *(replace(case, sliding_window=window) for window in windows),
    ]
    for seed, each in enumerate(cases):
        prompts = _Prompts(backend, replace(each, seed=seed), device)
        everyone = tuple(range(len(LENGTHS)))
        together = prompts.attend(everyone)
        for index, got_THD in zip(everyone, together, strict=True):
            prompts.compare(index, got_THD)
        if "batch_invariant" in capabilities.features:
            prompts.expect_same_bits(together)


class _Prompts:
    """Random prompts, and the layer and the builder of a case."""

    def __init__(
        self, backend: type[AttentionBackend], case: AttentionCase, device: torch.device
    ) -> None:
        import torch

        self.case, self.device = case, device
        self.dtype: torch.dtype = getattr(torch, case.dtype)
        generator = torch.Generator().manual_seed(case.seed)
        num_heads = case.num_heads + 2 * case.num_kv_heads
        self.qkv = [
            torch.randn((n, num_heads, case.head_size), generator=generator).to(self.dtype)
            for n in LENGTHS
        ]
        self.builder = backend.create_builder(
            AttentionGroupContext(
                spec=case.spec,
                device=device,
                max_num_seqs=len(LENGTHS),
                max_num_batched_tokens=sum(LENGTHS),
                max_model_len=max(LENGTHS),
                bidirectional=True,
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
                device=device,
                sliding_window=case.sliding_window,
                bidirectional=True,
            )
        )

    def _split(self, qkv_TND: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return views of q, k and v with the strides of a fused projection."""
        num_heads, num_kv_heads = self.case.num_heads, self.case.num_kv_heads
        q, k, v = qkv_TND.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        return q, k, v

    def _batch(self, lengths: Sequence[int]) -> AttentionBatch:
        """Return the batch of a step. The layer must not use its slots and block tables."""
        import torch

        starts = [0, *accumulate(lengths)]
        int32 = {"dtype": torch.int32, "device": self.device}
        return AttentionBatch(
            query_start_R1=torch.tensor(starts, **int32),
            seq_lens_R=torch.tensor(lengths, **int32),
            block_table_RM=torch.zeros((len(lengths), 1), **int32),
            slot_mapping_T=torch.zeros(starts[-1], dtype=torch.int64, device=self.device),
            query_lens=tuple(lengths),
            seq_lens=tuple(lengths),
        )

    def attend(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """Return the result of each prompt of a step. Check that the inputs are unchanged."""
        import torch

        lengths = [LENGTHS[index] for index in indices]
        qkv_TND = torch.cat([self.qkv[index] for index in indices]).to(self.device)
        before = qkv_TND.clone()
        q, k, v = self._split(qkv_TND)
        out_THD = torch.full(q.shape, float("nan"), dtype=self.dtype, device=self.device)
        cache = torch.empty(0, dtype=self.dtype, device=self.device)
        self.layer.forward(q, k, v, cache, self.builder.build(self._batch(lengths)), out_THD)
        expect(torch.equal(qkv_TND, before), f"the layer changed q, k or v. {self._what(indices)}")
        return list(out_THD.to("cpu").split(lengths))

    def compare(self, index: int, got_THD: torch.Tensor) -> None:
        """Compare the result of a prompt with the reference."""
        want_THD = reference_attention(
            *self._split(self.qkv[index]),
            scale=self.case.scale,
            sliding_window=self.case.sliding_window,
            bidirectional=True,
        )
        error_T = (got_THD.double() - want_THD).abs() / want_THD.abs().clamp(min=1.0)
        # A NaN is always an error, but comparisons with it are false.
        error_T = error_T.nan_to_num(nan=float("inf")).flatten(1).amax(1)
        token = int(error_T.argmax())
        expect(
            float(error_T[token]) <= self.case.tolerance,
            f"bidirectional attention is wrong: token {token} of the prompt of {LENGTHS[index]} "
            f"tokens has an error of {float(error_T[token])}; the tolerance is "
            f"{self.case.tolerance}. {self._what(range(len(LENGTHS)))}",
        )

    def expect_same_bits(self, together: Sequence[torch.Tensor]) -> None:
        """Check that each prompt, alone and reversed in the batch, equals `together` bitwise."""
        import torch

        everyone = range(len(LENGTHS))
        for indices in (*((index,) for index in everyone), tuple(everyone)[::-1]):
            for index, got_THD in zip(indices, self.attend(indices), strict=True):
                expect(
                    torch.equal(got_THD, together[index]),
                    f"batch_invariant is claimed, but the prompt of {LENGTHS[index]} tokens has "
                    f"results that differ bitwise from those in a batch. {self._what(indices)}",
                )

    def _what(self, indices: Sequence[int]) -> str:
        lengths = [LENGTHS[index] for index in indices]
        return f"The step has prompts of {lengths} tokens. The case is {self.case}."


def prompt_ranges(lengths: Sequence[int]) -> list[range]:
    """Return the indices of each prompt's tokens in a step."""
    return [range(start, end) for start, end in pairwise(accumulate(lengths, initial=0))]
