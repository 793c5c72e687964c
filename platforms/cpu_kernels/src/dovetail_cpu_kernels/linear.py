"""Packed linear layers as ctypes structs (see `dovetail_kernels.h`), and packing with checks.

A `LinearArgs` is filled once and reused; between calls only changed fields are set. Addresses are
integers, such as `tensor.data_ptr()`; the owner of the memory must keep it alive.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from dovetail_cpu_kernels.library import library, native_operation

BF16, INT8, INT4 = 0, 1, 2
GATE_UP, OUT_F32, BATCH_INVARIANT, ROUND = 1, 2, 4, 8
ACTIVATION_FLAGS = {"gelu": 16, "gelu_tanh": 32, "relu": 64, "silu": 128}
"""The flag of each activation that the operation applies to its output, without GATE_UP."""
REFINE, REFINE_MOST = 256, 512
"""Flags: activations in groups with a large scale have 15 bits; those of most groups."""
INT4_GROUPS = (32, 64, 128)
BLOCK_BYTES = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}
"""The block types of GGUF files that have kernels: numbers of values and bytes of a block."""
KIND_NAMES = ("bf16", "int8", "int4", *BLOCK_BYTES)
"""The name of each kind of weight; the index is the kind."""
ROUNDED = frozenset({"Q4_1", "Q4_K", "Q6_K"})
"""The block types that bf16 weights can be rounded to."""


class PackLinearArgs(ctypes.Structure):
    """The struct `dk_pack_linear_args`."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("packed", ctypes.c_void_p),
        ("num_nonfinite", ctypes.c_void_p),
        ("N", ctypes.c_int64),
        ("K", ctypes.c_int64),
        ("ld", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("flags", ctypes.c_int64),
        ("kind", ctypes.c_int64),
    )


class LinearArgs(ctypes.Structure):
    """The struct `dk_linear_args`."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("packed", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("M", ctypes.c_int64),
        ("N", ctypes.c_int64),
        ("K", ctypes.c_int64),
        ("ldx", ctypes.c_int64),
        ("ldy", ctypes.c_int64),
        ("ld_residual", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("flags", ctypes.c_int64),
        ("kind", ctypes.c_int64),
        ("limit", ctypes.c_float),
        ("alpha", ctypes.c_float),
    )


@dataclass(frozen=True, kw_only=True)
class PackedLinear:
    """Shape of a packed weight [N, K].

    kind: an index of KIND_NAMES. group: number of input features per scale, for INT4 only. gate_up:
    the first half of the rows is the gate projection, the second half the up projection, and the
    operation returns silu(gate) * up, N / 2 columns. rounds: whether a weight in bf16 is rounded to
    blocks of the type. refine: 0, REFINE or REFINE_MOST; the packed bytes do not depend on it.
    """

    kind: int
    N: int
    K: int
    group: int = 0
    gate_up: bool = False
    rounds: bool = False
    refine: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError for a shape that cannot be packed."""
        if self.kind not in range(len(KIND_NAMES)):
            raise ValueError(f"the kind of a weight is 0 to {len(KIND_NAMES) - 1}, not {self.kind}")
        if self.refine not in (0, REFINE, REFINE_MOST):
            raise ValueError(f"refine is 0, REFINE or REFINE_MOST, not {self.refine}")
        if self.N < 1 or self.K < 1:
            raise ValueError(f"a weight of shape [{self.N}, {self.K}] has no elements")
        if self.gate_up and self.N % 2:
            raise ValueError(
                "a fused weight of gate and up projections must have an even number of rows, not "
                f"{self.N}"
            )
        if self.kind == INT4 and self.group not in INT4_GROUPS:
            raise ValueError(f"an int4 group must have 32, 64 or 128 weights, not {self.group}")
        if self.rounds and KIND_NAMES[self.kind] not in ROUNDED:
            raise ValueError(f"weights cannot be rounded to {KIND_NAMES[self.kind]}")
        if _is_block_type(self.kind) and self.K % self.block[0]:
            raise ValueError(
                f"a row of {KIND_NAMES[self.kind]} must have a multiple of {self.block[0]} "
                f"weights, not {self.K}"
            )

    @property
    def is_blocks(self) -> bool:
        """Whether the weight is packed from rows of blocks, not from bf16."""
        return _is_block_type(self.kind) and not self.rounds

    @property
    def block(self) -> tuple[int, int]:
        """Number of values and number of bytes of a block."""
        return BLOCK_BYTES[KIND_NAMES[self.kind]]

    @property
    def flags(self) -> int:
        """Flags of packing and multiplying."""
        packing = (GATE_UP if self.gate_up else 0) | (ROUND if self.rounds else 0)
        return packing | (self.refine if self.kind != BF16 else 0)

    @property
    def num_outputs(self) -> int:
        """Number of columns of y."""
        return self.N // 2 if self.gate_up else self.N

    @property
    def num_bytes(self) -> int:
        """Size of the packed weight. Its buffer must be aligned to 64 bytes."""
        args = (self.kind, self.N, self.K, self.group, self.flags)
        return int(library().dk_packed_bytes(*args))


def pack(shape: PackedLinear, weight: int, packed: int, *, ld: int | None = None) -> int:
    """Pack bf16 `weight` [N, K] into `packed`. Return the number of weights that are not finite.

    Runs on the thread pool. weight, packed: addresses; `packed` is aligned to 64 bytes and has
    `shape.num_bytes` bytes. ld: number of elements from one row to the next, K by default. For
    blocks, `ld` is a number of bytes, and the result counts scales and minima. If the result is not
    0, `packed` is unusable.
    """
    if ld is None:
        values, num_bytes = shape.block if shape.is_blocks else (1, 1)
        ld = shape.K // values * num_bytes
    num_nonfinite = ctypes.c_int64(0)
    args = PackLinearArgs(
        weight,
        packed,
        ctypes.addressof(num_nonfinite),
        shape.N,
        shape.K,
        ld,
        shape.group,
        shape.flags,
        shape.kind,
    )
    native_operation(f"pack_linear_{_name_of(shape.kind)}")(ctypes.addressof(args))
    return num_nonfinite.value


def new_args(shape: PackedLinear, packed: int) -> LinearArgs:
    """Return a struct for `shape` and contiguous rows. The caller must set x, y and M."""
    args = LinearArgs(packed=packed, N=shape.N, K=shape.K, ldx=shape.K)
    args.ldy = args.ld_residual = shape.num_outputs
    args.group, args.flags, args.kind = shape.group, shape.flags, shape.kind
    return args


def operation(kind: int) -> ctypes._NamedFuncPointer:
    """Return the native function of `kind`: call it with the address of a LinearArgs."""
    return native_operation(f"linear_{_name_of(kind)}")


def _name_of(kind: int) -> str:
    return "blocks" if _is_block_type(kind) else KIND_NAMES[kind]


def _is_block_type(kind: int) -> bool:
    return KIND_NAMES[kind] in BLOCK_BYTES
