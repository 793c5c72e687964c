"""The errors of attention are only slightly larger than those of rounding the results.

Runs as interpreted_attention.py does.
"""

from __future__ import annotations

import pytest
from attention_rows import DEVICE

from dovetail_attn_triton.backend import TritonAttentionBackend
from dovetail_devkit.attention.rows import AttentionRows
from dovetail_devkit.suites.attention import AttentionCase

RUNS = ((70, 1), (0, 37), (20, 9), (300, 1))
LATENT = {"num_heads": 16, "num_kv_heads": 1, "head_size": 576, "value_size": 512}
SHAPES = {
    "grouped queries": {"num_heads": 8, "num_kv_heads": 2, "head_size": 128},
    "window, soft cap, sinks": {"sliding_window": 40, "soft_cap": 30.0, "sinks": True},
    "odd head size": {"num_heads": 3, "num_kv_heads": 3, "head_size": 80},
    "latent": LATENT,
}


class StrictRows(AttentionRows):
    """Rows that allow an error of at most twice the rounding error, plus 1e-3 · max|V|."""

    def expect_right(self, what, runs, actual):
        """Compare the result of each request with the reference. Values are the last heads."""
        num_heads, size = self.case.num_kv_heads, self.case.value_size or self.case.head_size
        largest = max(qkv[:, -num_heads:, :size].double().abs().max() for qkv in self.qkv)
        for (row, first, n), result in zip(runs, actual, strict=True):
            expected = self.want[row][first : first + n]
            rounding = (expected.to(self.dtype).double() - expected).abs().max()
            error = (result.double() - expected).abs().nan_to_num(nan=float("inf")).max()
            assert error <= 2 * rounding + 1e-3 * largest, f"row {row}: {what}"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", SHAPES)
def test_errors_are_only_slightly_larger_than_rounding_errors(shape, dtype):
    rows = StrictRows(
        TritonAttentionBackend, AttentionCase(runs=RUNS, dtype=dtype, **SHAPES[shape]), DEVICE
    )
    contexts = [(row, 0, context) for row, (context, _) in enumerate(RUNS) if context]
    rows.step("contexts", contexts)
    rows.step("runs", [(row, *run) for row, run in enumerate(RUNS)])
