"""The bytes of packed weights: a change needs a new PACK_VERSION, because caches keep them."""

import ctypes
import hashlib
import random

import pytest

import dovetail_cpu_kernels as native
from dovetail_cpu_kernels import linear
from dovetail_cpu_kernels.library import PACK_VERSION

pytestmark = pytest.mark.skipif(not native.status().available, reason=native.status().reason)

SCALES = {"Q6_K": (208,)} | {name: (0, 2) for name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K")}
"""Offsets of the float16 numbers in a block; 0 for other types."""
FORMATS = {
    "bf16": linear.PackedLinear(kind=linear.BF16, N=70, K=333),
    "int8": linear.PackedLinear(kind=linear.INT8, N=70, K=333),
    "int4/32": linear.PackedLinear(kind=linear.INT4, N=70, K=333, group=32),
    "int4/128": linear.PackedLinear(kind=linear.INT4, N=70, K=333, group=128),
    "int8, gate and up": linear.PackedLinear(kind=linear.INT8, N=70, K=333, gate_up=True),
    **{
        name: linear.PackedLinear(kind=linear.KIND_NAMES.index(name), N=50, K=512)
        for name in linear.BLOCK_BYTES
    },
    **{
        f"{name}, rounded": linear.PackedLinear(
            kind=linear.KIND_NAMES.index(name), N=50, K=512, rounds=True
        )
        for name in sorted(linear.ROUNDED)
    },
}
PACKED_5 = {
    "bf16": "818240d561f5d469",
    "int8": "976dd696aaae7d9c",
    "int4/32": "f5838d80c68198e8",
    "int4/128": "e949b2bda6224e71",
    "int8, gate and up": "dd82a8dfd352bdb3",
    "Q4_0": "ce8865ef2d9d51fd",
    "Q4_1": "531b44ef27360036",
    "Q5_0": "89e879ee8f0480c6",
    "Q5_1": "945d66a20b63a9bc",
    "Q8_0": "cbd16a7e7bbab4f0",
    "Q4_K": "3dff96713e7d8500",
    "Q5_K": "468c397620af3393",
    "Q6_K": "22c8854309780f87",
    "Q4_1, rounded": "ce2f44098d374886",
    "Q4_K, rounded": "35038313933aae38",
    "Q6_K, rounded": "28ccc2469f6177c0",
}
"""Hashes of the packed weights of version 5."""


def weights(shape):
    """Return deterministic bf16 numbers of magnitudes from 1/128 to 4, or blocks."""
    chance = random.Random(0)
    if not shape.is_blocks:
        numbers = [
            chance.getrandbits(1) << 15 | chance.randrange(120, 129) << 7 | chance.getrandbits(7)
            for _ in range(shape.N * shape.K)
        ]
        return (ctypes.c_uint16 * len(numbers))(*numbers)
    values, num_bytes = shape.block
    blocks = bytearray()
    for _ in range(shape.N * shape.K // values):
        block = bytearray(chance.randbytes(num_bytes))
        for offset in SCALES.get(linear.KIND_NAMES[shape.kind], (0,)):
            block[offset + 1] = chance.randrange(0x20, 0x30)  # float16 of usual magnitudes
        blocks += block
    return (ctypes.c_uint8 * len(blocks)).from_buffer(blocks)


def packed_hash(shape):
    source, memory = weights(shape), native.library().dk_alloc(shape.num_bytes)
    try:
        assert linear.pack(shape, ctypes.addressof(source), memory) == 0
        return hashlib.sha256(ctypes.string_at(memory, shape.num_bytes)).hexdigest()[:16]
    finally:
        native.library().dk_free(memory, shape.num_bytes)


def test_a_change_of_packed_bytes_needs_a_new_version():
    """If this fails, increase DK_PACK_VERSION and PACK_VERSION, and record the new hashes."""
    assert PACK_VERSION == 5
    assert {name: packed_hash(shape) for name, shape in FORMATS.items()} == PACKED_5
