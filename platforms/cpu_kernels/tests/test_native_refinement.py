"""Packed linear layers with refined activations: groups with a large scale have 15 bits."""

import ctypes
import random

import pytest
import torch
from torch.nn import functional

import dovetail_cpu_kernels as native
from dovetail_cpu_kernels import linear

pytestmark = [
    pytest.mark.skipif(not native.status().available, reason=native.status().reason),
    pytest.mark.usefixtures("restored"),
]

LEVELS = native.usable_levels()
SHARES = {linear.REFINE: 2.0, linear.REFINE_MOST: 0.7}
"""A group is refined if its scale is above this share of the mean scale of its token."""
KINDS = [(linear.INT8, 0), (linear.INT4, 32), (linear.INT4, 128)]
Q4_1 = linear.KIND_NAMES.index("Q4_1")
Q4_K = linear.KIND_NAMES.index("Q4_K")
Q6_K = linear.KIND_NAMES.index("Q6_K")


class Weight:
    """A random packed weight [N, K]. Its scales are finite."""

    def __init__(self, kind, N, K, *, group=0, refine=0, gate_up=False):
        self.generator = torch.Generator().manual_seed(N)
        rounds = kind in (Q4_1, Q4_K)
        self.shape = linear.PackedLinear(
            kind=kind, N=N, K=K, group=group, refine=refine, gate_up=gate_up, rounds=rounds
        )
        self.plain = torch.randn(N, K, generator=self.generator).bfloat16()
        rows, ld = self.plain, None
        if self.shape.is_blocks:
            rows = self.blocks()
            ld = rows.stride(0)
        self.memory = torch.zeros(self.shape.num_bytes + 64, dtype=torch.uint8)
        self.packed = -(-self.memory.data_ptr() // 64) * 64
        assert linear.pack(self.shape, rows.data_ptr(), self.packed, ld=ld) == 0

    def blocks(self):
        """Return random Q6_K blocks with the scale 1 / 512."""
        count, size = self.shape.K // 256, (self.shape.N, self.shape.K // 256, 210)
        rows = torch.randint(0, 256, size, generator=self.generator).to(torch.uint8)
        scale = torch.tensor([1 / 512], dtype=torch.float16).view(torch.uint8)
        rows[..., 208:] = scale
        return rows.view(self.shape.N, count * 210)

    def inputs(self, num_rows):
        """Return inputs whose groups of 16 have different magnitudes; some are 0."""
        K = self.shape.K
        x = torch.randn(num_rows, K, generator=self.generator)
        size = (num_rows, -(-K // 16))
        magnitudes = torch.randn(*size, generator=self.generator).mul(1.5).exp()
        magnitudes[torch.rand(size, generator=self.generator) < 0.1] = 0
        return (x * magnitudes.repeat_interleave(16, 1)[:, :K]).bfloat16()

    def apply(self, x, *, refine=None):
        """Return y in float32. refine: instead of the weight's."""
        y = torch.empty(len(x), self.shape.num_outputs)
        args = linear.new_args(self.shape, self.packed)
        if refine is not None:
            args.flags = args.flags & ~self.shape.refine | refine
        args.x, args.y, args.M = x.data_ptr(), y.data_ptr(), len(x)
        args.flags |= linear.OUT_F32
        linear.operation(self.shape.kind)(ctypes.addressof(args))
        return y

    def reference(self, x):
        """Return the product with the refined inputs, in float64."""
        group = 16 if self.shape.kind == Q6_K else self.shape.group or 32
        inputs = refined(x, group, SHARES[self.shape.refine])
        # An input feature that is alone is exact in 8 bits.
        ones = torch.eye(self.shape.K, dtype=torch.bfloat16)
        weight_KN = self.apply(127 * ones, refine=0).double() / 127
        return inputs[:, : self.shape.K] @ weight_KN


def refined(x, group, share):
    """Return the inputs in float64, quantized as in the kernels."""
    x = functional.pad(x.float(), (0, -x.shape[1] % group)).unflatten(1, (-1, group))
    scale = x.abs().amax(2, keepdim=True) / 127
    scale = (((scale.view(torch.int32) + 255) >> 8) << 8).view(torch.float32)
    total = torch.zeros_like(scale[:, :1])
    for index in range(scale.shape[1]):
        total = total + scale[:, index : index + 1]
    factor = torch.tensor(share) / torch.tensor(float(scale.shape[1]))
    is_refined = scale > total * factor
    inverse = torch.where(scale > 0, torch.ones_like(scale) / scale, torch.zeros_like(scale))
    fine = (x * (inverse * 128)).round()
    coarse = (x * inverse).round() * 128
    codes = torch.where(is_refined, fine, coarse)
    return (codes.double() * scale.double() / 128).flatten(1)


def relative_error(y, expected):
    return ((y.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("refine", SHARES)
@pytest.mark.parametrize(("kind", "group"), [*KINDS, (Q4_1, 0), (Q4_K, 0), (Q6_K, 0)])
def test_refined_layers_equal_the_reference(level, kind, group, refine):
    weight = Weight(kind, 45, 512, group=group, refine=refine)
    for rows in (1, 3, 6, 13, 140):
        x = weight.inputs(rows)
        assert relative_error(weight.apply(x), weight.reference(x)) < 3e-6, rows


@pytest.mark.parametrize("refine", SHARES)
def test_rows_that_are_not_a_multiple_of_the_group_are_refined(level, refine):
    weight = Weight(linear.INT8, 33, 301, refine=refine)
    x = weight.inputs(7)
    assert relative_error(weight.apply(x), weight.reference(x)) < 3e-6


@pytest.mark.parametrize("rows", [1, 8])
def test_sums_of_the_largest_codes_and_inputs_equal_the_reference(level, rows):
    """A group of a kernel with 16 bit inputs has the largest sum: 32 * 127 * 127 * 128."""
    weight = Weight(linear.INT8, 40, 128, refine=linear.REFINE_MOST)
    signs = torch.ones(40, 128, dtype=torch.bfloat16)
    signs[::2] = -1
    assert linear.pack(weight.shape, signs.data_ptr(), weight.packed) == 0
    x = torch.full((rows, 128), 127.0).bfloat16()
    x[rows // 2] *= -1
    assert relative_error(weight.apply(x), weight.reference(x)) < 3e-6


def test_refinement_reduces_the_error_of_activations():
    weight = Weight(linear.INT8, 64, 1024, refine=linear.REFINE)
    x = weight.inputs(50)
    halves = x.float() / 2
    exact = 2 * weight.apply(halves.bfloat16(), refine=linear.REFINE_MOST).double()
    plain = relative_error(weight.apply(x, refine=0), exact)
    some = relative_error(weight.apply(x), exact)
    assert some < plain / 2


@pytest.mark.parametrize("refine", SHARES)
@pytest.mark.parametrize(("kind", "group"), [KINDS[0], (Q4_1, 0)])
def test_the_refined_result_of_a_row_does_not_depend_on_its_batch(level, kind, group, refine):
    """Other rows of a tile have low parts in other groups."""
    chance = random.Random(kind)
    weight = Weight(kind, 70, 800, group=group, refine=refine)
    x = weight.inputs(270)
    alone = torch.cat([weight.apply(row) for row in x.split(1)])
    for rows in (2, 5, 7, 16, 33, 150, 270):
        for threads in (1, 3):
            native.set_num_threads(threads)
            begin = chance.randrange(len(x) - rows + 1)
            batch = weight.apply(x[begin : begin + rows])
            assert torch.equal(batch, alone[begin : begin + rows]), (rows, threads)


@pytest.mark.parametrize("refine", SHARES)
@pytest.mark.parametrize(("kind", "group"), [*KINDS, (Q4_1, 0), (Q6_K, 0)])
@pytest.mark.parametrize("rows", [5, 150])
def test_refined_results_are_bitwise_equal_at_every_vector_level(kind, group, rows, refine):
    weight = Weight(kind, 70, 1280, group=group, refine=refine)
    x = weight.inputs(rows)
    results = []
    for level in LEVELS[1:]:
        native.library().dk_set_level(level)
        results.append(weight.apply(x))
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_inputs_that_are_not_finite_affect_only_their_row_of_a_refined_layer(level, bad):
    weight = Weight(linear.INT8, 64, 128, refine=linear.REFINE_MOST)
    x = weight.inputs(9)
    good = weight.apply(x)
    x[4, 17] = bad
    y = weight.apply(x)
    assert not y[4].isfinite().any()
    others = [row for row in range(9) if row != 4]
    assert torch.equal(y[others], good[others])


def test_gate_and_up_projections_are_refined(level):
    weight = Weight(linear.INT8, 64, 256, refine=linear.REFINE_MOST, gate_up=True)
    apart = Weight(linear.INT8, 64, 256, refine=linear.REFINE_MOST)
    x = weight.inputs(20)
    gate, up = apart.apply(x).double().chunk(2, dim=1)
    assert relative_error(weight.apply(x), functional.silu(gate) * up) < 3e-6
