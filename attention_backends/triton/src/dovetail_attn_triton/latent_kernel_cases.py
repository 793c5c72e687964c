"""Launches of the latent-attention kernels, for compiling them without a GPU.

Vectors have 576 features, of which 512 are the value, as in DeepSeek V2 and V3. A layer has 16
heads, as V2 Lite or a rank of V3, or 128.
"""

from __future__ import annotations

import triton.language as tl

from dovetail_attn_triton.latent_kernels import attend_latent, write_vectors
from dovetail_attn_triton.latent_layer import WRITE_FEATURES, WRITE_TOKENS, latent_sizes
from dovetail_attn_triton.latent_tiles import latent_shape
from dovetail_attn_triton.tiles import SharedMemory
from dovetail_devkit.triton.compiled_kernels import KernelCase

_SIZES = (576, 512)
_BLOCK_SIZE = 16
_STEP_TENSORS = {name: "*i32" for name in ("query_start_ptr", "seq_lens_ptr", "table_ptr")}
_STEP_SIZES = {name: "i32" for name in ("num_splits", "least_span", "item_tokens", "table_stride")}
_STRIDES = (
    *(f"{of}_{which}_stride" for of in ("q", "out") for which in ("token", "head")),
    "block_stride",
)
_COMPUTE = {"*bf16": tl.bfloat16, "*fp32": tl.float32}
TARGETS = {
    SharedMemory.LARGE: ("sm_80", "sm_90", "sm_100"),
    SharedMemory.MEDIUM: ("sm_89", "sm_120"),
    SharedMemory.SMALL: ("gfx942",),
}


def latent_kernel_cases() -> tuple[KernelCase, ...]:
    """Return the cases of all latent-attention kernels."""
    return (
        *(case for memory in SharedMemory for case in _attend_cases(memory)),
        KernelCase(
            name="write_vectors: bf16, 576 features",
            kernel=write_vectors,
            types={
                **dict.fromkeys(("k_ptr", "cache_ptr"), "*bf16"),
                "slots_ptr": "*i64",
                **dict.fromkeys(("num_tokens", "k_token_stride", "block_stride"), "i32"),
            },
            constexprs={
                "HEAD_SIZE": _SIZES[0],
                "BLOCK_SIZE": _BLOCK_SIZE,
                "TOKENS": WRITE_TOKENS,
                "FEATURES": WRITE_FEATURES,
            },
            unaligned=frozenset({"slots_ptr", "num_tokens"}),
        ),
    )


def _attend_cases(memory: SharedMemory) -> tuple[KernelCase, ...]:
    return (
        _attend("decode with splits", 16, ("parts_ptr",), memory),
        _attend("decode with splits", 128, ("parts_ptr",), memory),
        _attend("prefill", 16, ("work_ptr",), memory),
        _attend("prefill", 128, ("work_ptr",), memory),
        _attend("decode", 16, ("parts_ptr",), memory, dtype="*fp32"),
    )


def _attend(
    what: str,
    num_heads: int,
    arguments: tuple[str, ...],
    memory: SharedMemory,
    dtype: str = "*bf16",
) -> KernelCase:
    """Return a case of `attend_latent`. arguments: the optional ones that are not None."""
    optional = {"parts_ptr": "*fp32", "work_ptr": "*i32"}
    types = {
        **dict.fromkeys(("q_ptr", "cache_ptr", "out_ptr"), dtype),
        **_STEP_TENSORS,
        **_STEP_SIZES,
        **dict.fromkeys(_STRIDES, "i32"),
        **{name: optional[name] for name in arguments},
        "factor": "fp32",
    }
    shape = latent_shape(num_heads, _SIZES, wide=dtype == "*fp32", memory=memory)
    tile = shape.long if what == "prefill" else shape.short
    return KernelCase(
        name=f"attend_latent: {what}, {dtype[1:]}, {num_heads} heads, {memory.value} tiles",
        kernel=attend_latent,
        types=types,
        constexprs={
            **latent_sizes((num_heads, shape.group), *_SIZES),
            **dict.fromkeys(optional.keys() - set(arguments)),
            "BLOCK_SIZE": _BLOCK_SIZE,
            "ROWS": tile.rows,
            "TILE": tile.positions,
            "COMPUTE": _COMPUTE[dtype],
        },
        unaligned=frozenset({*_STEP_TENSORS, *_STEP_SIZES, *(set(arguments) & {"work_ptr"})}),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        targets=TARGETS[memory],
        max_spill_bytes={"gfx942": 588} if dtype == "*fp32" else {},
    )
