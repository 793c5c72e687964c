"""Launches of the kernels for gates and latent inputs, for compiling them without a GPU.

Sizes are those of Mamba 2 and Qwen3-Next 80B (gated norms), and of DeepSeek V3 (latent vectors of
512 features). This module imports Triton.
"""

from __future__ import annotations

import torch

from dovetail_devkit.triton.compiled_kernels import KernelCase
from dovetail_ops_triton.kernels import gates, head_products, latent_rows
from dovetail_ops_triton.kernels.norms import tile_of
from dovetail_ops_triton.kernels.targets import AMD_STAGES
from dovetail_ops_triton.state_kernel_cases import AMD, COMPUTE, PRECISIONS

_RANK, _PLAIN, _ROTARY, _HEADS = 512, 128, 64, 128
_DTYPES = {"*bf16": torch.bfloat16, "*fp32": torch.float32}
_INNER = ("x_outer_stride", "x_inner_stride", "gate_outer_stride", "gate_inner_stride")


def gate_kernel_cases() -> tuple[KernelCase, ...]:
    """Return the cases of all kernels for gates and latent inputs."""
    return (
        _gate("sigmoid_and_mul", 4096, is_gelu=False),
        _gate("gelu_tanh_and_mul", 2048, is_gelu=True),
        _gated_norm("groups of 1024", 1024, norm_first=False),
        _gated_norm("heads of 128", 128, norm_first=True),
        *(_shared_expert(2048, has_gate) for has_gate in (True, False)),
        *_heads("keys", "*bf16", _PLAIN, _RANK, transposed=True),
        *_heads("values", "*bf16", _RANK, _PLAIN, transposed=False),
        *_heads("values", "*fp32", _RANK, _PLAIN, transposed=False),
        _latent_rows(),
    )


def _gate(what: str, size: int, *, is_gelu: bool) -> KernelCase:
    return KernelCase(
        name=f"{what} {size}",
        kernel=gates.gate_and_mul_kernel,
        types=dict.fromkeys(("x_ptr", "gate_ptr", "y_ptr"), "*bf16")
        | dict.fromkeys(("num_inner", *_INNER), "i32"),
        constexprs={"IS_GELU": is_gelu, "SIZE": size, "BLOCK": gates.BLOCK},
        unaligned=frozenset({"num_inner"}),
    )


def _gated_norm(what: str, size: int, *, norm_first: bool) -> KernelCase:
    block, num_together, num_warps = tile_of(size)
    pointers = {"x_ptr": "*fp32"} | dict.fromkeys(("gate_ptr", "weight_ptr", "y_ptr"), "*bf16")
    return KernelCase(
        name=f"gated_rms_norm {what}",
        kernel=gates.gated_norm_kernel,
        types=pointers
        | dict.fromkeys(("num_rows", "num_groups", "weight_stride", *_INNER), "i32")
        | {"eps": "fp32"},
        constexprs={"NORM_FIRST": norm_first, "SIZE": size, "BLOCK": block, "ROWS": num_together},
        unaligned=frozenset({"num_rows", "num_groups"}),
        num_warps=num_warps,
    )


def _shared_expert(size: int, has_gate: bool) -> KernelCase:
    block, num_together, num_warps = tile_of(size)
    pointers = ["y_ptr", "shared_ptr", "x_ptr", "out_ptr"] + ["gate_ptr"] * has_gate
    strides = ("num_rows", "y_stride", "shared_stride", "x_stride")
    missing = {} if has_gate else {"gate_ptr": None}
    return KernelCase(
        name=f"add_shared_expert {size}{', gate' * has_gate}",
        kernel=gates.shared_expert_kernel,
        types=dict.fromkeys(pointers, "*bf16") | dict.fromkeys(strides, "i32"),
        constexprs={"SIZE": size, "BLOCK": block, "ROWS": num_together} | missing,
        unaligned=frozenset({"num_rows"}),
        num_warps=num_warps,
    )


def _heads(
    what: str, dtype: str, in_size: int, out_size: int, *, transposed: bool
) -> tuple[KernelCase, ...]:
    """Return the cases of `head_linear`. transposed: whether a row of the weights is an input."""
    contiguous = "weight_out_stride" if transposed else "weight_in_stride"
    strides = {f"{of}_{which}_stride" for of in "xy" for which in ("token", "head")}
    strides |= {"weight_head_stride", "weight_out_stride", "weight_in_stride"}
    types = dict.fromkeys(("x_ptr", "weight_ptr", "y_ptr"), dtype) | {"num_tokens": "i32"}
    types |= dict.fromkeys(sorted(strides - {contiguous}), "i32")
    sizes = head_products.product_constants(in_size, out_size, _DTYPES[dtype], "cuda")
    return tuple(
        KernelCase(
            name=f"head_linear: {what}, {dtype[1:]}",
            kernel=head_products.head_linear_kernel,
            types=types,
            constexprs=sizes | {contiguous: 1, "COMPUTE": COMPUTE[dtype], "PRECISION": precision},
            unaligned=frozenset({"num_tokens"}),
            num_stages=AMD_STAGES if targets == AMD else head_products.NUM_STAGES,
            targets=targets,
        )
        for precision, targets in PRECISIONS
    )


def _latent_rows() -> KernelCase:
    pointers = ("q_ptr", "latent_ptr", "norm_ptr", "queries_ptr", "keys_ptr")
    strides = ("q_token_stride", "q_head_stride", "latent_stride", "cos_sin_stride")
    return KernelCase(
        name=f"latent_inputs: keys of {_RANK}, {_HEADS} heads",
        kernel=latent_rows.latent_rows_kernel,
        types=dict.fromkeys(pointers, "*bf16")
        | {"positions_ptr": "*i64", "cos_sin_ptr": "*fp32", "eps": "fp32"}
        | dict.fromkeys(strides, "i32"),
        constexprs=dict(latent_rows.kernel_constants(_HEADS, _PLAIN, _RANK, _ROTARY)),
    )
