"""Packed linear layers at every level of this CPU, compared with float64 sums."""

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

# Relative error in norm. bf16 outputs: at most 2^-9 per element. float32: sums of up to 1,024
# terms; groups and gates add one rounding per group and a vector exponential.
TOLERANCE = {torch.bfloat16: 3e-3, torch.float32: 3e-6}
LEVELS = native.usable_levels()
KINDS = [
    (linear.BF16, 0),
    (linear.INT8, 0),
    (linear.INT4, 32),
    (linear.INT4, 64),
    (linear.INT4, 128),
]
ROWS = (1, 2, 3, 6, 7, 12, 13, 24, 33, 64, 250)
SHAPES = ((64, 128), (50, 37), (130, 300), (33, 1), (1, 65), (256, 1024))


class Weight:
    """A random packed weight [N, K]. `exact` is the dequantized weight, in float64."""

    def __init__(self, kind, N, K, *, group=0, gate_up=False, seed=0, scale=0.0):
        self.shape = linear.PackedLinear(kind=kind, N=N, K=K, group=group, gate_up=gate_up)
        self.generator = torch.Generator().manual_seed(seed)
        self.plain = self.random(N, K, scale=scale or K**-0.5)
        self.memory = torch.zeros(self.shape.num_bytes + 64, dtype=torch.uint8)
        self.packed = -(-self.memory.data_ptr() // 64) * 64
        assert linear.pack(self.shape, self.plain.data_ptr(), self.packed) == 0
        self.exact = quantized_weight(self.plain, self.shape)

    def random(self, *size, scale=1.0):
        return (torch.randn(*size, generator=self.generator) * scale).bfloat16()

    def apply(self, x, *, bias=None, residual=None, dtype=torch.bfloat16, out=None, flags=0):
        rows, columns = x.shape[0], self.shape.num_outputs
        y = torch.full((rows, columns), 7.0, dtype=dtype) if out is None else out
        args = linear.new_args(self.shape, self.packed)
        args.x, args.y, args.M = x.data_ptr(), y.data_ptr(), rows
        args.ldx, args.ldy = x.stride(0), y.stride(0)
        args.flags |= flags | linear.OUT_F32 * (y.dtype == torch.float32)
        if bias is not None:
            args.bias = bias.data_ptr()
        if residual is not None:
            args.residual, args.ld_residual = residual.data_ptr(), residual.stride(0)
        linear.operation(self.shape.kind)(ctypes.addressof(args))
        return y

    def reference(self, x, *, bias=None, residual=None):
        y = quantized_input(x, self.shape) @ self.exact.T
        y = y if bias is None else y + bias.double()
        if self.shape.gate_up:
            gate, up = y.chunk(2, dim=1)
            y = functional.silu(gate) * up
        return y if residual is None else y + residual.double()


def divided(numerator, x):
    """Divide exactly. For scalar / tensor, torch multiplies the scalar by the reciprocal."""
    return torch.full_like(x, numerator) / x


def in_groups(x, group):
    return functional.pad(x.float(), (0, -x.shape[1] % group)).unflatten(1, (-1, group))


def rounded_up(x, bits):
    """Round positive float32 numbers up to numbers whose last `bits` bits are 0."""
    return ((x.view(torch.int32) + (1 << bits) - 1) >> bits << bits).view(torch.float32)


def quantized_bytes(x, group):
    """Return int8 numbers with a scale per row and group, quantized as in the kernels."""
    x = in_groups(x, group)
    scale = rounded_up(x.abs().amax(2, keepdim=True) / 127, bits=8)
    return rounded_products(x, scale)


def rounded_products(x, scale):
    q = torch.where(scale > 0, (x * divided(1.0, scale)).round(), torch.zeros_like(x))
    return (q.double() * scale.double()).flatten(1)


def quantized_input(x, shape):
    if shape.kind == linear.BF16:
        return x.double()
    return quantized_bytes(x, shape.group or 32)


def quantized_weight(w, shape):
    if shape.kind == linear.BF16:
        return w.double()
    groups = in_groups(w, shape.group or 32)
    if shape.kind == linear.INT8:
        return rounded_products(
            groups, rounded_up(groups.abs().amax(2, keepdim=True) / 127, bits=16)
        )
    greatest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    steps = (groups * divided(2048.0, greatest)).round()
    q = (steps * (-8.0 / 2048)).round().clamp(max=7).double()
    sum_wq, sum_qq = (steps * q).sum(2, keepdim=True), (q * q).sum(2, keepdim=True)
    scale = (sum_wq / sum_qq * (greatest.double() / 2048)).float().bfloat16().double()
    return torch.where(greatest.abs() >= 1e-29, q * scale, 0.0).flatten(1)


def assert_near(y, reference):
    error = ((y.double() - reference).norm() / reference.norm()).item()
    assert error < TOLERANCE[y.dtype], error


@pytest.mark.costly
@pytest.mark.sampled(6)
@pytest.mark.parametrize(("kind", "group"), KINDS)
def test_linear_layers_of_every_shape_equal_the_reference(level, kind, group):
    for N, K in SHAPES:
        weight = Weight(kind, N, K, group=group, seed=N)
        for rows in ROWS:
            x = weight.random(rows, K)
            assert_near(weight.apply(x, dtype=torch.float32), weight.reference(x))
            assert_near(weight.apply(x), weight.reference(x))


@pytest.mark.parametrize(("kind", "group"), KINDS[:3])
@pytest.mark.parametrize("gate_up", [False, True])
def test_bias_residual_gates_and_float32_outputs_equal_the_reference(level, kind, group, gate_up):
    for N, K, rows in ((100, 96, 5), (38, 70, 17), (256, 512, 1)):
        weight = Weight(kind, N, K, group=group, gate_up=gate_up, seed=rows)
        columns = weight.shape.num_outputs
        x, bias = weight.random(rows, K), weight.random(N)
        residual = weight.random(rows, columns)
        for options in (
            {"bias": bias},
            {"residual": residual},
            {"bias": bias, "residual": residual},
        ):
            assert_near(weight.apply(x, **options), weight.reference(x, **options))
        expected = weight.reference(x, residual=residual)
        assert weight.apply(x, residual=residual, out=residual) is residual
        assert_near(residual, expected)


@pytest.mark.parametrize(("kind", "group"), KINDS[:3])
def test_rows_of_linear_layers_may_have_any_address_and_stride(level, kind, group):
    """Addresses and strides are unaligned. Memory between the rows of y must not change."""
    N, K, rows = 45, 77, 14
    weight = Weight(kind, N, K, group=group)
    x = weight.random(rows, K + 6)[:, 3 : K + 3]
    whole = torch.full((rows, N + 5), 7.0, dtype=torch.bfloat16)
    y = weight.apply(x, out=whole[:, 1 : N + 1])
    assert_near(y, weight.reference(x))
    assert (whole[:, 0] == 7).all() and (whole[:, N + 1 :] == 7).all()


@pytest.mark.costly
@pytest.mark.parametrize(("kind", "group"), KINDS[:3])
@pytest.mark.parametrize(("N", "K"), [(200, 600), (33, 4200)], ids=["short", "long"])
def test_the_result_of_a_row_does_not_depend_on_its_batch(level, kind, group, N, K):
    """A row is bitwise equal in every batch, with every tiling, and on one or three threads."""
    chance = random.Random(kind)
    weight = Weight(kind, N, K, group=group)
    x = weight.random(300, K)
    alone = torch.cat([weight.apply(x[i : i + 1], dtype=torch.float32) for i in range(len(x))])
    for rows in (2, 3, 5, 7, 12, 13, 16, 25, 32, 100, 241, 300):
        for threads in (1, 3):
            native.set_num_threads(threads)
            begin = chance.randrange(len(x) - rows + 1)
            batch = weight.apply(x[begin : begin + rows], dtype=torch.float32)
            assert torch.equal(batch, alone[begin : begin + rows]), (rows, threads)


@pytest.mark.parametrize(("kind", "group"), KINDS[:2])
def test_large_batches_divided_among_threads_have_bitwise_equal_results(level, kind, group):
    weight = Weight(kind, 330, 128, group=group)
    x, bias = weight.random(1500, 128), weight.random(330)
    parts = [weight.apply(part, bias=bias) for part in x.split(100)]
    assert_near(torch.cat(parts), weight.reference(x, bias=bias))
    for threads in (1, 2, 3):
        native.set_num_threads(threads)
        assert torch.equal(weight.apply(x, bias=bias), torch.cat(parts)), threads


ACTIVATIONS = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
}


@pytest.mark.costly
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize(("kind", "group"), KINDS[:3])
def test_activations_are_applied_after_the_bias_and_before_the_residual(level, kind, group, name):
    for N, K, rows in ((100, 96, 5), (38, 70, 17), (256, 512, 40)):
        weight = Weight(kind, N, K, group=group, seed=rows)
        x, bias, residual = weight.random(rows, K), weight.random(N), weight.random(rows, N)
        expected = ACTIVATIONS[name](weight.reference(x, bias=bias))
        flags = {"flags": linear.ACTIVATION_FLAGS[name]}
        assert_near(weight.apply(x, bias=bias, **flags), expected)
        assert_near(weight.apply(x, bias=bias, dtype=torch.float32, **flags), expected)
        y = weight.apply(x, bias=bias, residual=residual, **flags)
        assert_near(y, expected + residual.double())


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_of_large_and_of_tiny_numbers_are_precise(level, name):
    """The only input feature is multiplied by 1."""
    weight = Weight(linear.BF16, 1, 1)
    one = torch.ones(1, 1).bfloat16()
    linear.pack(weight.shape, one.data_ptr(), weight.packed)
    magnitudes = torch.cat([torch.logspace(-30, 30, 100), torch.linspace(0.05, 20, 300)])
    x = torch.cat([magnitudes, -magnitudes, torch.zeros(1)]).bfloat16()[:, None]
    flags = linear.ACTIVATION_FLAGS[name]
    y = weight.apply(x, dtype=torch.float32, flags=flags).double()
    expected = ACTIVATIONS[name](x.double())
    assert ((y - expected).abs() <= 1e-6 + 2e-6 * expected.abs()).all()


@pytest.mark.parametrize(("kind", "group"), KINDS[1:])
@pytest.mark.parametrize("rows", [5, 37, 150])
def test_integer_matrix_products_are_bitwise_equal_at_every_vector_level(kind, group, rows):
    """The sums are exact integers, so it does not matter whether a level multiplies bytes, pairs or
    matrix tiles."""
    weight = Weight(kind, 70, 1200, group=group)
    x = weight.random(rows, 1200)
    results = []
    for level in LEVELS[1:]:
        native.library().dk_set_level(level)
        results.append(weight.apply(x, dtype=torch.float32))
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize(("kind", "group"), KINDS[1:3])
def test_all_instruction_sets_pack_the_same_bytes(kind, group):
    packed = []
    for level in LEVELS:
        native.library().dk_set_level(level)
        weight = Weight(kind, 70, 333, group=group, gate_up=True, seed=1)
        begin = weight.packed - weight.memory.data_ptr()
        packed.append(weight.memory[begin : begin + weight.shape.num_bytes])
    assert all(torch.equal(packed[0], other) for other in packed[1:])


@pytest.mark.parametrize(("kind", "group"), KINDS[:3])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_counted(level, kind, group, bad):
    shape = linear.PackedLinear(kind=kind, N=50, K=70, group=group)
    weight = torch.ones(50, 70, dtype=torch.bfloat16)
    weight[3, 69] = weight[49, 0] = bad
    memory = torch.zeros(shape.num_bytes + 64, dtype=torch.uint8)
    assert linear.pack(shape, weight.data_ptr(), -(-memory.data_ptr() // 64) * 64) == 2


@pytest.mark.parametrize(("kind", "group"), KINDS[:3])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_inputs_that_are_not_finite_affect_only_their_row(level, kind, group, bad):
    weight = Weight(kind, 64, 128, group=group)
    x = weight.random(9, 128)
    good = weight.apply(x)
    x[4, 17] = bad
    y = weight.apply(x)
    assert not y[4].isfinite().any()
    others = [row for row in range(9) if row != 4]
    assert torch.equal(y[others], good[others])


@pytest.mark.parametrize("scale", [5e37, 1e-20])
def test_weights_of_any_magnitude_are_packed_accurately(level, scale):
    for kind, group in KINDS[:3]:
        weight = Weight(kind, 64, 128, group=group, scale=scale)
        x = weight.random(3, 128, scale=1e-3)
        assert_near(weight.apply(x, dtype=torch.float32), weight.reference(x))


def test_zeros_and_tiny_numbers_equal_the_reference(level):
    for kind, group in KINDS[:3]:
        weight = Weight(kind, 64, 128, group=group)
        x = torch.zeros(3, 128, dtype=torch.bfloat16)
        x[1] = 1e-38
        assert weight.apply(x, dtype=torch.float32).abs().max() < 1e-35


def test_a_replay_repeats_the_recorded_operations():
    weight = Weight(linear.BF16, 64, 64)
    x, y = weight.random(2, 64), torch.zeros(2, 64, dtype=torch.bfloat16)
    args = linear.new_args(weight.shape, weight.packed)
    args.x, args.y, args.M = x.data_ptr(), y.data_ptr(), 2
    function = ctypes.cast(linear.operation(linear.BF16), ctypes.c_void_p).value
    calls = (ctypes.c_void_p * 4)(
        function, ctypes.addressof(args), function, ctypes.addressof(args)
    )
    native.library().dk_replay(ctypes.addressof(calls), 2)
    assert torch.equal(y, weight.apply(x))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"kind": linear.BF16, "N": 0, "K": 3}, "no elements"),
        ({"kind": linear.INT4, "N": 4, "K": 64, "group": 48}, "32, 64 or 128"),
        ({"kind": linear.KIND_NAMES.index("Q4_K"), "N": 4, "K": 96}, "multiple of 256"),
        ({"kind": linear.BF16, "N": 5, "K": 8, "gate_up": True}, "even"),
        ({"kind": -1, "N": 4, "K": 256}, "0 to 10, not -1"),
        ({"kind": linear.INT8, "N": 4, "K": 64, "refine": 768}, "REFINE_MOST, not 768"),
    ],
)
def test_invalid_shapes_are_rejected(wrong, says):
    with pytest.raises(ValueError, match=says):
        linear.PackedLinear(**wrong)
