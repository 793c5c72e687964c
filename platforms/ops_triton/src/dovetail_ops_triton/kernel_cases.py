"""The launches of all kernels, for compiling them without a GPU.

Sizes are those of models with 0.6 B and 8 B parameters. The dtype is bfloat16, or float32 for
programs that then need the most resources. This module imports Triton.
"""

from __future__ import annotations

from dovetail_devkit.triton.compiled_kernels import KernelCase
from dovetail_ops_triton.expert_kernel_cases import expert_kernel_cases
from dovetail_ops_triton.gate_kernel_cases import gate_kernel_cases
from dovetail_ops_triton.kernels import best_columns, cuts, drawing, elementwise, embedding, rotary
from dovetail_ops_triton.kernels import step_inputs as steps
from dovetail_ops_triton.kernels.layer_norms import add_layer_norm_kernel, layer_norm_kernel
from dovetail_ops_triton.kernels.norms import add_rms_norm_kernel, rms_norm_kernel, tile_of
from dovetail_ops_triton.state_kernel_cases import state_kernel_cases

_STRIDES = {"outer_stride": "i32", "inner_stride": "i32"}
_ROW = {"row_stride": "i32", "vocab_size": "i32"}
_PARTS = {"ids_ptr": "*i64", "parts_ptr": "*i64", "num_tiles": "i32"}
_RUNS = {"rows_ptr": "*i32", "starts_ptr": "*i32", "query_start_ptr": "*i32"}


def kernel_cases() -> tuple[KernelCase, ...]:
    """Return the cases of all kernels."""
    return (
        _norm("heads of 128", 128, "*bf16"),
        _norm("1024", 1024, "*bf16"),
        _norm("8192, float32", 8192, "*fp32"),
        _norm("2048, offset", 2048, "*bf16", 1.0),
        _add_norm(4096, "*bf16"),
        _rotary("128", 128, 128),
        _rotary("128, rotary_dim 64", 128, 64),
        KernelCase(
            name="silu_and_mul 3072",
            kernel=elementwise.silu_and_mul_kernel,
            types={"x_ptr": "*bf16", "y_ptr": "*bf16", "num_inner": "i32"} | _STRIDES,
            constexprs={"SIZE": 3072, "BLOCK": elementwise.BLOCK},
            unaligned=frozenset({"num_inner"}),
        ),
        _scale("scale 640", "*bf16", is_cap=False),
        _scale("soft_cap, float32", "*fp32", is_cap=True),
        KernelCase(
            name="embedding 1024",
            kernel=embedding.embedding_kernel,
            types={
                "ids_ptr": "*i64",
                "table_ptr": "*bf16",
                "y_ptr": "*bf16",
                "table_stride": "i32",
            },
            constexprs={"SIZE": 1024, "BLOCK": embedding.BLOCK},
        ),
        *(_layer_norm(add) for add in (False, True)),
        *_sampling(),
        *_step_inputs(),
        *expert_kernel_cases(),
        *gate_kernel_cases(),
        *state_kernel_cases(),
    )


def _norm(what: str, size: int, dtype: str, offset: float = 0.0) -> KernelCase:
    block, num_together, num_warps = tile_of(size)
    return KernelCase(
        name=f"rms_norm {what}",
        kernel=rms_norm_kernel,
        types={"x_ptr": dtype, "weight_ptr": dtype, "y_ptr": dtype, "eps": "fp32"}
        | {"num_rows": "i32", "num_inner": "i32"}
        | _STRIDES,
        constexprs={"SIZE": size, "BLOCK": block, "ROWS": num_together, "OFFSET": offset},
        unaligned=frozenset({"num_rows", "num_inner"}),
        num_warps=num_warps,
    )


def _add_norm(size: int, dtype: str) -> KernelCase:
    block, num_together, num_warps = tile_of(size)
    pointers = dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "y_ptr"), dtype)
    return KernelCase(
        name=f"add_rms_norm {size}",
        kernel=add_rms_norm_kernel,
        types=pointers
        | {"num_rows": "i32", "x_stride": "i32", "residual_stride": "i32", "eps": "fp32"},
        constexprs={"SIZE": size, "BLOCK": block, "ROWS": num_together, "OFFSET": 0.0},
        unaligned=frozenset({"num_rows"}),
        num_warps=num_warps,
    )


def _scale(name: str, dtype: str, *, is_cap: bool) -> KernelCase:
    return KernelCase(
        name=name,
        kernel=elementwise.scale_kernel,
        types=dict.fromkeys(("x_ptr", "y_ptr"), dtype)
        | {"num_inner": "i32", "factor": "fp32", "size": "i32"}
        | _STRIDES,
        constexprs={"IS_CAP": is_cap, "BLOCK": elementwise.BLOCK},
        unaligned=frozenset({"num_inner"}),
    )


def _layer_norm(add: bool) -> KernelCase:
    """Return a case with a weight and a bias. add: whether a residual is added."""
    size = 2048
    block, num_together, num_warps = tile_of(size)
    names = ["x_ptr", "weight_ptr", "bias_ptr", "y_ptr"] + ["residual_ptr"] * add
    strides = {"x_stride": "i32", "residual_stride": "i32"}
    strides = strides if add else {"num_inner": "i32"} | _STRIDES
    return KernelCase(
        name=f"{'add_' * add}layer_norm {size}",
        kernel=add_layer_norm_kernel if add else layer_norm_kernel,
        types=dict.fromkeys(names, "*bf16") | {"num_rows": "i32", "eps": "fp32"} | strides,
        constexprs={"SIZE": size, "BLOCK": block, "ROWS": num_together},
        unaligned=frozenset({"num_rows", "num_inner"} & {"num_rows", *strides}),
        num_warps=num_warps,
    )


def _rotary(what: str, head_size: int, rotary_dim: int) -> KernelCase:
    pointers = dict.fromkeys(("q_ptr", "k_ptr", "q_out_ptr", "k_out_ptr"), "*bf16")
    strides = [f"{of}_{which}_stride" for of in "qk" for which in ("token", "head")]
    return KernelCase(
        name=f"rotary_embedding {what}",
        kernel=rotary.rotary_kernel,
        types=pointers
        | {"positions_ptr": "*i64", "cos_sin_ptr": "*fp32", "cos_sin_stride": "i32"}
        | dict.fromkeys(strides, "i32"),
        constexprs=dict(rotary.kernel_constants((16, 8), head_size, rotary_dim)),
    )


def _sampling() -> tuple[KernelCase, ...]:
    columns = {
        "logits_ptr": "*fp32",
        "temperature_ptr": "*fp32",
        "seeds_ptr": "*i64",
        "positions_ptr": "*i64",
        "cuts_ptr": "*i64",
        "counts_ptr": "*i64",
        "candidates_ptr": "*i64",
    }
    limits = {"top_k_ptr": "*i32", "top_p_ptr": "*fp32", "min_p_ptr": "*fp32"}
    cut_columns = {
        key: columns[key] for key in columns if key not in ("seeds_ptr", "positions_ptr")
    }
    candidates = {"CANDIDATES": drawing.CANDIDATES}
    whole = {"TILE": best_columns.TILE, "IS_WHOLE": True}
    unaligned = frozenset({"num_tiles", "ids_ptr", "parts_ptr", *limits, *columns} - {"logits_ptr"})
    return (
        KernelCase(
            name="best_tokens, bfloat16",
            kernel=best_columns.best_columns_kernel,
            types={"logits_ptr": "*bf16"} | _ROW | _PARTS,
            constexprs=whole | {"IS_WHOLE": False},
            unaligned=unaligned,
            num_warps=best_columns.NUM_WARPS,
        ),
        KernelCase(
            name="best_tokens: join parts",
            kernel=best_columns.join_parts_kernel,
            types={"parts_ptr": "*i64", "ids_ptr": "*i64", "num_parts": "i32"},
            constexprs={"PARTS": best_columns.MAX_PARTS},
            unaligned=unaligned | {"num_parts"},
            num_warps=1,
        ),
        KernelCase(
            name="draw_tokens: apply top-k and top-p",
            kernel=cuts.cuts_kernel,
            types=cut_columns | limits | _ROW | {"deviations": "fp32"},
            constexprs={"BLOCK": drawing.CUT_BLOCK} | candidates,
            unaligned=unaligned,
            num_warps=drawing.CUT_WARPS,
        ),
        KernelCase(
            name="draw_tokens",
            kernel=drawing.draw_kernel,
            types=columns | _ROW | _PARTS,
            constexprs=whole | candidates,
            unaligned=unaligned,
            num_warps=best_columns.NUM_WARPS,
        ),
    )


def _step_inputs() -> tuple[KernelCase, ...]:
    created = {"input_ids_ptr": "*i64", "positions_ptr": "*i64", "seq_lens_ptr": "*i32"}
    tables = {"table_ptr": "*i32", "slots_ptr": "*i64", "out_ptr": "*i32"}
    return (
        KernelCase(
            name="prepare_inputs: tokens and positions",
            kernel=steps.tokens_kernel,
            types=_RUNS | {"token_ids_ptr": "*i32", "row_stride": "i32"} | created,
            constexprs={"BLOCK": steps.BLOCK},
            unaligned=frozenset(_RUNS),
        ),
        KernelCase(
            name="prepare_inputs: slots and block tables",
            kernel=steps.blocks_kernel,
            types=_RUNS | tables | {"table_stride": "i32", "width": "i32"},
            constexprs={"BLOCK_SIZE": 16, "BLOCK": steps.BLOCK},
            unaligned=frozenset(_RUNS) | {"width"},
        ),
    )
