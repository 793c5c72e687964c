"""All launch variants of this package's kernels, to compile them without a GPU.

They cover the layers and steps of an engine, with the tiles of each class of devices. Head sizes
that are padded to the same tile have one case, and some cases combine several features.
"""

from __future__ import annotations

import triton.language as tl

from dovetail_attn_triton.attention_kernels import attend, combine
from dovetail_attn_triton.cache_kernel import write_cache
from dovetail_attn_triton.latent_kernel_cases import latent_kernel_cases
from dovetail_attn_triton.layer import COMBINE_CHUNK, COMBINE_WARPS, LARGEST, WRITE_TILE
from dovetail_attn_triton.metadata import CHUNK
from dovetail_attn_triton.options import TritonAttentionOptions
from dovetail_attn_triton.tiles import SharedMemory, attention_shape, padded
from dovetail_attn_triton.work_kernels import list_work
from dovetail_devkit.triton.compiled_kernels import TARGETS, KernelCase

_GROUP = 4
_NUM_KV_HEADS = 8
_BLOCK_SIZE = 16
_STEP_SIZES = {name: "i32" for name in ("num_splits", "least_span", "item_tokens")}
_STEP_TENSORS = {"query_start_ptr": "*i32", "seq_lens_ptr": "*i32", "work_ptr": "*i32"}
_STRIDES = {"out_token_stride": "i32", "out_head_stride": "i32"}
_COMPUTE = {"*bf16": tl.bfloat16, "*fp16": tl.float16, "*fp32": tl.float32}
_FP8 = "*fp8e4nv"
_E5M2 = "*fp8e5"
_FP8_DTYPES = (_FP8, _E5M2)
_LARGEST = {_FP8: LARGEST["fp8_e4m3"], _E5M2: LARGEST["fp8_e5m2"]}
_TARGETS = {
    SharedMemory.LARGE: ("sm_80", "sm_90", "sm_100"),
    SharedMemory.MEDIUM: ("sm_89", "sm_120"),
    SharedMemory.SMALL: ("gfx942",),
}
_NO_FP8 = {"sm_80"}
"""Targets without an instruction that converts fp8."""
_PLAIN_OPTIONAL = ("scales_ptr", "layer_scales_ptr", "parts_ptr", "sinks_ptr", "work_ptr", "cap")


def kernel_cases() -> tuple[KernelCase, ...]:
    """Return the cases of all kernels."""
    return (
        *(case for memory in SharedMemory for case in _attend_cases(memory)),
        _write(128, "*bf16"),
        _write(80, _FP8),
        _write(128, "*bf16", rotates=True),
        _write(80, _FP8, rotates=True),
        _write(128, _FP8, of_layer=True),
        _write(128, _E5M2, of_layer=True),
        _combine(128),
        _list_work(),
        *latent_kernel_cases(),
    )


def _attend_cases(memory: SharedMemory) -> tuple[KernelCase, ...]:
    """Return the cases of `attend` with the tiles of one class of devices."""

    def decode(what: str, head_size: int, *arguments: str, **types: str) -> KernelCase:
        return _attend(f"decode{what}", head_size, arguments, memory, **types)

    def prefill(what: str, head_size: int, *arguments: str, **types: str) -> KernelCase:
        return _attend(f"prefill{what}", head_size, ("work_ptr", *arguments), memory, **types)

    return (
        decode(" with splits", 128, "parts_ptr"),
        decode("", 64, dtype="*fp16"),
        decode(" with all options", 256, "parts_ptr", "sinks_ptr", "cap", "work_ptr"),
        decode(", fp8 cache", 128, "parts_ptr", "scales_ptr", cache=_FP8),
        decode(", per-layer scales", 128, "parts_ptr", "layer_scales_ptr", cache=_FP8),
        decode(", per-layer scales", 128, "layer_scales_ptr", cache=_E5M2),
        decode(", float32", 128, "parts_ptr", dtype="*fp32"),
        prefill("", 128),
        prefill(", window, soft cap, sinks", 80, "cap", "sinks_ptr"),
        prefill("", 256, dtype="*fp16"),
        prefill(", fp8 cache", 64, "scales_ptr", cache=_FP8),
        prefill(", fp8 cache", 128, "scales_ptr", cache=_FP8),
        prefill(", per-layer scales", 128, "layer_scales_ptr", cache=_FP8),
        prefill(", per-layer scales", 64, "layer_scales_ptr", cache=_E5M2),
    )


def _sizes(head_size: int) -> dict[str, object]:
    return {
        "NUM_HEADS": _NUM_KV_HEADS,
        "HEAD_SIZE": head_size,
        "PADDED_SIZE": padded(head_size),
    }


def _attend(
    what: str,
    head_size: int,
    arguments: tuple[str, ...],
    memory: SharedMemory,
    *,
    dtype: str = "*bf16",
    cache: str = "",
) -> KernelCase:
    """Return a case of `attend`. arguments: names of the optional arguments that are not None."""
    heads = (_GROUP * _NUM_KV_HEADS, _NUM_KV_HEADS, head_size)
    is_fp8 = cache in _FP8_DTYPES
    shape = attention_shape(heads, wide=dtype == "*fp32", memory=memory, is_fp8=is_fp8)
    tile = shape.long if what.startswith("prefill") else shape.short
    types = {
        "q_ptr": dtype,
        "cache_ptr": cache or dtype,
        "scales_ptr": "*fp32",
        "layer_scales_ptr": "*fp32",
        "out_ptr": dtype,
        "parts_ptr": "*fp32",
        "sinks_ptr": "*fp32",
        **_STEP_TENSORS,
        "table_ptr": "*i32",
        **{f"q_{name}_stride": "i32" for name in ("token", "head")},
        **_STRIDES,
        **{f"{name}_stride": "i32" for name in ("block", "scale", "table")},
        **_STEP_SIZES,
        "factor": "fp32",
        "cap": "fp32",
    }
    left_out = set(_PLAIN_OPTIONAL) - set(arguments)
    return KernelCase(
        name=f"attend: {what}, {(cache or dtype)[1:]}, head size {head_size}, {memory.value} tiles",
        kernel=attend,
        types={name: output for name, output in types.items() if name not in left_out},
        constexprs={
            **dict.fromkeys(left_out),
            **_sizes(head_size),
            "GROUP": _GROUP,
            "BLOCK_SIZE": _BLOCK_SIZE,
            "ROWS": tile.rows,
            "TILE": tile.positions,
            "WINDOW": 1024 if "cap" in arguments else 0,
            "COMPUTE": tl.float16 if is_fp8 and dtype == "*bf16" else _COMPUTE[dtype],
        },
        unaligned=frozenset({*_STEP_TENSORS, *_STEP_SIZES, "table_ptr", "table_stride"}),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        targets=_targets(_TARGETS[memory], cache),
        max_spill_bytes=_spills(what, arguments, cache, memory),
    )


def _spills(
    what: str, arguments: tuple[str, ...], cache: str, memory: SharedMemory
) -> dict[str, int]:
    """Return the number of register spills that are allowed.

    The prefill tile of fp8 caches spills registers on gfx942, where it was not measured. On sm_120,
    the assembler uses only 128 registers for prefill with all options.
    """
    if not what.startswith("prefill"):
        return {}
    if cache and memory is SharedMemory.SMALL:
        return {"gfx942": 184}
    return {"sm_120": 24} if "cap" in arguments else {}


def _targets(targets: tuple[str, ...], cache: str) -> tuple[str, ...]:
    """Return the targets that support the dtype of the cache."""
    return tuple(target for target in targets if cache not in _FP8_DTYPES or target not in _NO_FP8)


def _write(
    head_size: int, cache: str, *, rotates: bool = False, of_layer: bool = False
) -> KernelCase:
    """Return a case of `write_cache`. of_layer: whether the fp8 cache has per-layer scales."""
    scales = {"layer_scales_ptr" if of_layer else "scales_ptr": "*fp32"}
    rotary = {"rotated_ptr": "*bf16", "positions_ptr": "*i64", "cos_sin_ptr": "*fp32"}
    types = {
        **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), "*bf16"),
        "cache_ptr": cache,
        "slots_ptr": "*i64",
        "num_tokens": "i32",
        **{f"{x}_{y}_stride": "i32" for x in ("q", "k", "v", "rotated") for y in ("token", "head")},
        **dict.fromkeys(("cos_sin_stride", "block_stride", "scale_stride"), "i32"),
        **(rotary if rotates else {}),
        **(scales if cache in _FP8_DTYPES else {}),
    }
    constexprs = _sizes(head_size) | {"BLOCK_SIZE": _BLOCK_SIZE, "TILE": WRITE_TILE}
    constexprs["HALF"] = head_size // 2 if rotates else 0
    constexprs["LARGEST"] = _LARGEST.get(cache, 0.0)
    what = "write_cache with rotation" if rotates else "write_cache"
    what += " and per-layer scales" if of_layer else ""
    return KernelCase(
        name=f"{what}: {cache[1:]}, head size {head_size}",
        kernel=write_cache,
        types=types,
        constexprs=constexprs
        | dict.fromkeys({*rotary, "scales_ptr", "layer_scales_ptr"} - types.keys()),
        unaligned=frozenset({"slots_ptr", "positions_ptr", "num_tokens"} & types.keys()),
        targets=_targets(TARGETS, cache),
    )


def _combine(head_size: int) -> KernelCase:
    types = {"parts_ptr": "*fp32", "out_ptr": "*bf16", **_STEP_TENSORS, **_STRIDES, **_STEP_SIZES}
    del types["work_ptr"]
    return KernelCase(
        name=f"combine: bf16, head size {head_size}",
        kernel=combine,
        types=types,
        constexprs={
            "work_ptr": None,
            **_sizes(head_size),
            "GROUP": _GROUP,
            "ROWS": 16,
            "TILE": 64,
            "MAX_SPLITS": padded(TritonAttentionOptions().max_splits),
            "WINDOW": 0,
            "CHUNK": COMBINE_CHUNK,
        },
        unaligned=frozenset({*_STEP_TENSORS, *_STEP_SIZES}),
        num_warps=COMBINE_WARPS,
    )


def _list_work() -> KernelCase:
    return KernelCase(
        name="list_work",
        kernel=list_work,
        types={"query_start_ptr": "*i32", "short_ptr": "*i32", "long_ptr": "*i32"},
        constexprs={"SHORT": 4, "TILE": 32, "CHUNK": CHUNK},
        unaligned=frozenset({"query_start_ptr"}),
    )
