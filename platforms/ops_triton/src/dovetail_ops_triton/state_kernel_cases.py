"""Launches of the kernels for recurrent operations, for compiling them without a GPU.

Sizes are those of Qwen3-Next 80B (delta rule; 16 groups, 32 heads of 128), of Mamba 2 models (heads
of 64, keys of 128 or 256), and of RecurrentGemma 2B (2,560 channels). This module imports Triton.
"""

from __future__ import annotations

import torch
import triton.language as tl

from dovetail_devkit.triton.compiled_kernels import KernelCase
from dovetail_ops_triton.kernels.states import chunk_systems, recurrence
from dovetail_ops_triton.kernels.states import convolution as conv
from dovetail_ops_triton.kernels.states import linear_states as linear
from dovetail_ops_triton.kernels.states.state_plan import CHUNK_SIZE

NVIDIA = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
AMD = ("gfx942",)
PRECISIONS = (("tf32x3", NVIDIA), ("ieee", AMD))
"""How each target multiplies float32 numbers; see `kernels.targets.precision_of`."""

_BLOCKS = {"states_ptr": "*fp32", "reads_ptr": "*i64", "writes_ptr": "*i64"}
_LISTS = {"runs_ptr": "*i32", "ends_ptr": "*i32"}
_UNALIGNED = frozenset({"reads_ptr", "writes_ptr", "singles_ptr", *_LISTS, "chunks_ptr"})
_DTYPES = {"*bf16": torch.bfloat16, "*fp32": torch.float32}
COMPUTE = {"*bf16": tl.bfloat16, "*fp32": tl.float32}


def state_kernel_cases() -> tuple[KernelCase, ...]:
    """Return the cases of all kernels for recurrent operations."""
    sizes = {
        "delta rule, heads of 128": linear.kernel_sizes(16, 32, 128, 128),
        "keys of 128, heads of 64": linear.kernel_sizes(8, 128, 128, 64),
        "keys of 256, heads of 64": linear.kernel_sizes(1, 32, 256, 64),
    }
    names = tuple(sizes)
    return (
        *_convolutions("causal_conv", 8192, 4, "*bf16"),
        *_convolutions("plain_causal_conv", 2560, 4, "*bf16"),
        *_recurrences(2560, "*bf16"),
        *_recurrences(2560, "*fp32"),
        *(_attend_singles(name, sizes[name], "*bf16") for name in names),
        *_prepare(names[0], sizes[names[0]], "*bf16"),
        *_prepare(names[0], sizes[names[0]], "*fp32"),
        *_prepare(names[2], sizes[names[2]], "*bf16"),
        *(case for name in names for case in _attend_runs(name, sizes[name], "*bf16")),
        *_attend_runs(names[0], sizes[names[0]], "*fp32"),
    )


def _convolutions(
    operation: str, num_channels: int, width: int, dtype: str
) -> tuple[KernelCase, ...]:
    tensors = dict.fromkeys(("x_ptr", "weight_ptr", "states_ptr", "y_ptr"), dtype)
    strides = dict.fromkeys(("x_stride", "weight_stride", "block_stride"), "i32")
    sizes = {"CHANNELS": num_channels, "WIDTH": width}
    kept = sizes | {"KEPT_BLOCK": width, "BLOCK": conv.BLOCK}
    activated = {"ACTIVATED": operation == "causal_conv"}
    reads, writes = {"reads_ptr": "*i64"}, {"writes_ptr": "*i64"}
    what = f"{operation} {num_channels}, {width} inputs"
    convolutions = (
        KernelCase(
            name=f"{what}: decodes",
            kernel=conv.convolve_singles_kernel,
            types=tensors | strides | reads | writes,
            constexprs=kept | activated | {"bias_ptr": None, "singles_ptr": None},
            unaligned=_UNALIGNED | {"weight_stride"},
        ),
        KernelCase(
            name=f"{what}: decodes of a mixed step, bias",
            kernel=conv.convolve_singles_kernel,
            types=tensors | strides | reads | writes | {"bias_ptr": dtype, "singles_ptr": "*i32"},
            constexprs=kept | activated,
            unaligned=_UNALIGNED | {"weight_stride"},
        ),
        KernelCase(
            name=f"{what}: chunks, bias",
            kernel=conv.convolve_chunks_kernel,
            types=tensors | strides | reads | {"bias_ptr": dtype, "chunks_ptr": "*i32"},
            constexprs=sizes | activated | {"LENGTH": CHUNK_SIZE, "BLOCK": conv.CHUNK_BLOCK},
            unaligned=_UNALIGNED | {"weight_stride"},
        ),
    )
    if operation != "causal_conv":
        return convolutions
    return (
        *convolutions,
        KernelCase(
            name=f"{what}: save states",
            kernel=conv.save_inputs_kernel,
            types={
                key: of
                for key, of in (tensors | strides | reads | writes | _LISTS).items()
                if not key.startswith(("weight", "y"))
            },
            constexprs=kept,
            unaligned=_UNALIGNED,
        ),
    )


def _recurrences(num_channels: int, dtype: str) -> tuple[KernelCase, ...]:
    types = dict.fromkeys(("x_ptr", "input_ptr", "decay_ptr", "y_ptr"), dtype)
    types |= dict.fromkeys(("input_bias_ptr", "decay_bias_ptr", "rates_ptr"), "*fp32") | _BLOCKS
    strides = ("x_stride", "input_stride", "decay_stride", "block_stride")
    types |= dict.fromkeys(strides, "i32")
    what = f"gated_recurrence {num_channels}, {dtype[1:]}"
    return (
        KernelCase(
            name=f"{what}: decodes",
            kernel=recurrence.recur_singles_kernel,
            types=types,
            constexprs={
                "CHANNELS": num_channels,
                "BLOCK": recurrence.BLOCK,
                "singles_ptr": None,
            },
            unaligned=_UNALIGNED,
        ),
        KernelCase(
            name=f"{what}: prompts",
            kernel=recurrence.recur_runs_kernel,
            types=types | _LISTS,
            constexprs={
                "CHANNELS": num_channels,
                "LENGTH": recurrence.LENGTH,
                "BLOCK": recurrence.RUN_BLOCK,
            },
            unaligned=_UNALIGNED,
            num_warps=recurrence.RUN_WARPS,
        ),
    )


def _tensors(dtype: str) -> dict[str, str]:
    """Return the types of the inputs, states and results of linear attention."""
    inner = {"q": "group", "k": "group", "v": "head"}
    strides = [f"{of}_{which}_stride" for of in inner for which in ("token", inner[of])]
    return {
        **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), dtype),
        "out_ptr": "*fp32",
        **_BLOCKS,
        **dict.fromkeys((*strides, "block_stride"), "i32"),
    }


def _steps(dtype: str) -> dict[str, str]:
    """Return the types of the step sizes and of what is computed from them."""
    return {
        "steps_ptr": dtype,
        **dict.fromkeys(("step_bias_ptr", "rates_ptr"), "*fp32"),
        **dict.fromkeys(("steps_stride", "beta_stride"), "i32"),
        **dict.fromkeys(("step_min", "step_max", "key_eps"), "fp32"),
    }


def _attend_singles(what: str, sizes: dict[str, int], dtype: str) -> KernelCase:
    """Return a case with the delta rule and norms, or with skip connections, as in Mamba 2."""
    delta = "delta" in what
    own = {"beta_ptr": dtype} if delta else {"skip_ptr": "*fp32"}
    missing = dict.fromkeys({"beta_ptr", "skip_ptr", "singles_ptr"} - own.keys())
    return KernelCase(
        name=f"linear_attention, {what}: decodes",
        kernel=linear.attend_singles_kernel,
        types=_tensors(dtype) | _steps(dtype) | own,
        constexprs=sizes | {"NORMALIZE": delta} | missing,
        unaligned=_UNALIGNED,
        max_spill_bytes={"sm_120": 32} if delta else {},
    )


def _prepare(what: str, sizes: dict[str, int], dtype: str) -> tuple[KernelCase, ...]:
    delta = "delta" in what
    types = {
        key: of
        for key, of in (_tensors(dtype) | _steps(dtype)).items()
        if key.startswith(("q", "k", "step", "rates", "beta"))
    }
    types |= {"chunks_ptr": "*i32", "prepared_ptr": "*fp32"} | (
        {"beta_ptr": dtype} if delta else {}
    )
    own = {key: sizes[key] for key in ("NUM_HEADS", "REPEATS", "KEY_SIZE")}
    own |= {"NORMALIZE": delta} | chunk_systems.product_constants(_DTYPES[dtype], "cuda")
    own |= {"COMPUTE": COMPUTE[dtype]} | ({} if delta else {"beta_ptr": None})
    return tuple(
        KernelCase(
            name=f"linear_attention, {what}: prepare chunks, {dtype[1:]}",
            kernel=chunk_systems.prepare_chunks_kernel,
            types=types,
            constexprs=own | {"PRECISION": precision},
            unaligned=_UNALIGNED,
            num_stages=chunk_systems.NUM_STAGES,
            targets=targets,
        )
        for precision, targets in PRECISIONS
    )


def _attend_runs(what: str, sizes: dict[str, int], dtype: str) -> tuple[KernelCase, ...]:
    delta = "delta" in what
    types = _tensors(dtype) | _LISTS | {"prepared_ptr": "*fp32"}
    types |= {} if delta else {"skip_ptr": "*fp32"}
    own = sizes | {"DELTA": delta, "PIECE": linear.PIECE, "LENGTH": CHUNK_SIZE}
    own |= {"skip_ptr": None} if delta else {}
    return tuple(
        KernelCase(
            name=f"linear_attention, {what}: prompts, {dtype[1:]}",
            kernel=linear.attend_runs_kernel,
            types=types,
            constexprs=own | {"PRECISION": precision},
            unaligned=_UNALIGNED,
            num_stages=linear.NUM_STAGES,
            targets=targets,
        )
        for precision, targets in PRECISIONS
    )
