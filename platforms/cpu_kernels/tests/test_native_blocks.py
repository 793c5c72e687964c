"""Linear layers packed from blocks of GGUF files give exact results at every level."""

import ctypes

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize

import dovetail_cpu_kernels as native
from dovetail_cpu_kernels import linear

pytestmark = [
    pytest.mark.skipif(not native.status().available, reason=native.status().reason),
    pytest.mark.usefixtures("restored"),
]

LEVELS = native.usable_levels()
TYPES = tuple(linear.BLOCK_BYTES)
SCALES = {"Q6_K": (208,)} | {name: (0, 2) for name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K")}
"""Offsets of the float16 numbers in a block; 0 for other types."""


class Blocks:
    """Random blocks [N, K] of a type, and their exact values in float64."""

    def __init__(self, name, N, K, seed=0):
        values, num_bytes = linear.BLOCK_BYTES[name]
        chance = np.random.default_rng(seed)
        blocks = chance.integers(0, 256, (N, K // values, num_bytes), np.uint8)
        for offset in SCALES.get(name, (0,)):
            # Positive and negative numbers, including subnormal numbers and 0.
            halves = chance.choice([0.01, -0.013, 1.7, 3e-6, 0.0, 65504 / 8], blocks.shape[:2])
            blocks[..., offset : offset + 2] = halves.astype(np.float16)[..., None].view(np.uint8)
        self.name, self.rows = name, torch.from_numpy(blocks.reshape(N, -1))
        self.shape = linear.PackedLinear(kind=linear.KIND_NAMES.index(name), N=N, K=K)

    @property
    def exact(self):
        return exact_values(self.name, self.rows.numpy())

    def pack(self):
        self.memory = torch.zeros(self.shape.num_bytes + 64, dtype=torch.uint8)
        self.packed = -(-self.memory.data_ptr() // 64) * 64
        return linear.pack(self.shape, self.rows.data_ptr(), self.packed, ld=self.rows.stride(0))

    def apply(self, x):
        y = torch.empty(len(x), self.shape.N, dtype=torch.float32)
        args = linear.new_args(self.shape, self.packed)
        args.x, args.y, args.M, args.flags = x.data_ptr(), y.data_ptr(), len(x), linear.OUT_F32
        linear.operation(self.shape.kind)(ctypes.addressof(args))
        return y


def exact_values(name, rows):
    """Return the values of blocks in float64. Values of the K types are computed without rounding.

    The gguf package rounds values of the K types to float32; its results confirm these values.
    """
    kind = gguf.GGMLQuantizationType[name]
    with np.errstate(all="ignore"):
        values = dequantize(rows, kind).astype(np.float64)
    if name not in ("Q4_K", "Q5_K"):
        return torch.from_numpy(values)
    # Products without minima, and minima without products, are exact in float32.
    _, num_bytes = linear.BLOCK_BYTES[name]
    without = rows.reshape(len(rows), -1, num_bytes).copy()
    without[..., 2:4] = 0
    products = dequantize(without.reshape(rows.shape), kind).astype(np.float64)
    minima = rows.reshape(len(rows), -1, num_bytes).copy()
    minima[..., 0:2] = 0
    exact = products + dequantize(minima.reshape(rows.shape), kind).astype(np.float64)
    assert np.allclose(exact, values, rtol=1e-6, atol=1e-6 * np.abs(products).max())
    return torch.from_numpy(exact)


def exact_inputs(rows, K, seed=0):
    """Return bf16 inputs that int8 represents exactly in each group: 127 and small whole numbers.

    Different groups have different powers of two.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-127, 128, (rows, K), generator=generator).float()
    x[:, ::16] = 127.0
    powers = torch.randint(-6, 7, (rows, K // 16), generator=generator).repeat_interleave(16, 1)
    # Both halves of 32 values have the same power of two, so groups of 16 and of 32 are exact.
    powers = powers.view(rows, -1, 32)[:, :, :1].expand(-1, -1, 32).reshape(rows, K)
    return (x * 2.0 ** powers.float()).bfloat16()


@pytest.mark.costly
@pytest.mark.parametrize("name", TYPES)
def test_matrix_products_with_quantized_blocks_equal_those_with_dequantized_values(level, name):
    """Inputs are exact in int8, so only sums in float32 are rounded."""
    for N, K, rows in ((33, 256, 1), (70, 512, 5), (32, 768, 7), (5, 1024, 40)):
        blocks = Blocks(name, N, K, seed=rows)
        assert blocks.pack() == 0
        x = exact_inputs(rows, K, seed=N)
        got, want = blocks.apply(x).double(), x.double() @ blocks.exact.T
        # The error is relative to the magnitudes of the terms, because minima and products cancel.
        magnitude = x.double().abs() @ parts_of(blocks).T
        error = ((got - want).abs() / magnitude.clamp_min(1e-30)).max().item()
        assert error < 1e-6, (N, K, rows, error)


def parts_of(blocks):
    """Return for each value |code · scale| + |minimum|, the sum of the magnitudes of its parts."""
    name, rows = blocks.name, blocks.rows.numpy()
    if name not in ("Q4_1", "Q5_1", "Q4_K", "Q5_K"):
        return blocks.exact.abs()
    _, num_bytes = linear.BLOCK_BYTES[name]
    total = torch.zeros_like(blocks.exact)
    for zeroed in (0, 2):
        as_bytes = rows.reshape(len(rows), -1, num_bytes).copy()
        as_bytes[..., zeroed : zeroed + 2] = 0
        values = dequantize(as_bytes.reshape(rows.shape), gguf.GGMLQuantizationType[name])
        total += torch.from_numpy(values.astype(np.float64)).abs()
    return total


@pytest.mark.costly
@pytest.mark.parametrize("name", TYPES)
def test_a_row_of_a_matrix_product_with_blocks_does_not_depend_on_its_batch(level, name):
    # Kernels for many rows divide 1,792 features into blocks that begin inside of 256 features.
    blocks = Blocks(name, 70, 1792)
    assert blocks.pack() == 0
    x = torch.randn(150, 1792, generator=torch.Generator().manual_seed(1)).bfloat16()
    alone = torch.cat([blocks.apply(x[i : i + 1]) for i in range(len(x))])
    for rows in (2, 3, 5, 6, 7, 12, 16, 33, 150):
        for threads in (1, 3):
            native.set_num_threads(threads)
            assert torch.equal(blocks.apply(x[-rows:].contiguous()), alone[-rows:]), rows


@pytest.mark.parametrize("name", TYPES)
def test_all_instruction_sets_pack_blocks_to_the_same_bytes(name):
    packed = []
    for level in LEVELS:
        native.library().dk_set_level(level)
        blocks = Blocks(name, 50, 512)
        assert blocks.pack() == 0
        begin = blocks.packed - blocks.memory.data_ptr()
        packed.append(blocks.memory[begin : begin + blocks.shape.num_bytes])
    assert all(torch.equal(packed[0], other) for other in packed[1:])


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nonfinite_scales_of_blocks_are_counted(name, bad):
    offsets = SCALES.get(name, (0,))
    blocks = Blocks(name, 40, 512)
    whole = blocks.rows.view(40, -1, linear.BLOCK_BYTES[name][1])
    half = torch.from_numpy(np.array([bad], np.float16).view(np.uint8))
    for row, offset in ((3, offsets[0]), (39, offsets[-1])):
        whole[row, -1, offset : offset + 2] = half
    assert blocks.pack() == 2


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("Q4_0", 4.5),
        ("Q4_1", 5.0),
        ("Q5_0", 8.5),
        ("Q5_1", 9.0),
        ("Q8_0", 8.5),
        ("Q4_K", 4.625),
        ("Q5_K", 8.625),
        ("Q6_K", 6.5625),
    ],
)
def test_packed_blocks_have_the_documented_size(name, bits):
    shape = linear.PackedLinear(kind=linear.KIND_NAMES.index(name), N=64, K=1024)
    assert shape.num_bytes * 8 == 64 * 1024 * bits
