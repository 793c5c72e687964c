"""Launches of the mixture-of-experts kernels, for compiling them without a GPU.

Sizes are those of Qwen3-MoE 30B (128 experts, 8 per token) and of DeepSeek V3 (256 experts in 8
groups), and of gpt-oss 20B (biases, clamped activations). This module imports Triton.
"""

from __future__ import annotations

from dataclasses import replace

from dovetail.interfaces.ops import ExpertRouting
from dovetail_devkit.triton.compiled_kernels import KernelCase
from dovetail_ops_triton.kernels import experts, routing
from dovetail_ops_triton.kernels.targets import AMD_STAGES
from dovetail_ops_triton.state_kernel_cases import AMD, COMPUTE, PRECISIONS

_LISTS = {"order_ptr": "*i32", "starts_ptr": "*i32"}
_QWEN = (128, (2048, 768), 8)
_OSS = (32, (2880, 2880), 4)


def expert_kernel_cases() -> tuple[KernelCase, ...]:
    """Return the cases of all mixture-of-experts kernels."""
    few, many, wide = experts.FEW, experts.MANY, experts.WIDE
    pairs = {"experts_ptr": "*i64", "num_pairs": "i32", **_LISTS}
    sums = {"y_ptr": "*bf16", "weights_ptr": "*fp32", "out_ptr": "*bf16"}
    plain = ExpertRouting(top_k=8, renormalize=True)
    grouped = ExpertRouting(top_k=8, scores="sigmoid", renormalize=True, scale=2.5)
    grouped = replace(grouped, num_groups=8, top_groups=4)
    return (
        *_logits("*bf16", 128, 2048),
        *_logits("*fp32", 128, 2048),
        _choose("128", 128, plain),
        _choose("256 in groups", 256, grouped),
        KernelCase(
            name="fused_experts: sort",
            kernel=experts.sort_kernel,
            types=pairs,
            constexprs={"BLOCK": experts.SORT_BLOCK},
            unaligned=frozenset({"num_pairs"}),
        ),
        *_products("few tokens", few, "*bf16", _QWEN),
        *_products("many tokens", many, "*bf16", _QWEN),
        *_products("many tokens, biases", many, "*bf16", _OSS),
        *_products("float32", wide, "*fp32", _QWEN),
        KernelCase(
            name="fused_experts: sum",
            kernel=experts.sum_kernel,
            types=sums,
            constexprs={"SIZE": 2048, "TOP_K": 8, "BLOCK": experts.SUM_BLOCK},
        ),
    )


def _logits(dtype: str, num_experts: int, size: int) -> tuple[KernelCase, ...]:
    width = 2 if dtype == "*bf16" else 4
    types = {"x_ptr": dtype, "weight_ptr": dtype, "logits_ptr": "*fp32"}
    types |= dict.fromkeys(("num_tokens", "x_stride", "weight_stride"), "i32")
    return tuple(
        KernelCase(
            name=f"select_experts: logits, {dtype[1:]}",
            kernel=routing.logits_kernel,
            types=types,
            constexprs={
                "bias_ptr": None,
                "SIZE": size,
                "NUM_EXPERTS": num_experts,
                "TOKENS": routing.TOKENS,
                "EXPERTS": routing.EXPERTS,
                "FEATURES": routing.FEATURES * 2 // width,
                "COMPUTE": COMPUTE[dtype],
                "PRECISION": precision,
            },
            unaligned=frozenset({"num_tokens"}),
            num_stages=AMD_STAGES if targets == AMD else routing.NUM_STAGES,
            targets=targets,
        )
        for precision, targets in PRECISIONS
    )


def _choose(what: str, num_experts: int, rule: ExpertRouting) -> KernelCase:
    types = {"logits_ptr": "*fp32", "experts_ptr": "*i64", "weights_ptr": "*fp32", "scale": "fp32"}
    corrected = {"correction_ptr": "*fp32"} if rule.num_groups > 1 else {}
    constants = routing.choice_constants(num_experts, rule)
    return KernelCase(
        name=f"select_experts: {what}",
        kernel=routing.choose_kernel,
        types=types | corrected,
        constexprs=constants | dict.fromkeys({"correction_ptr"} - corrected.keys()),
        num_warps=routing.CHOICE_WARPS,
    )


def _products(
    what: str, tile: experts.ExpertTile, dtype: str, layer: tuple[int, tuple[int, int], int]
) -> tuple[KernelCase, ...]:
    """Return the cases of both projections. layer: number of experts, sizes, experts per token."""
    num_experts, sizes, top_k = layer
    strides = {"expert_stride": "i32", "weight_stride": "i32"}
    bias = {"bias_ptr": dtype} if "biases" in what else {}
    up = {"x_ptr": dtype, "weight_ptr": dtype, "inner_ptr": dtype, "x_stride": "i32"}
    up |= {"limit": "fp32", "alpha": "fp32"} | strides | _LISTS | bias
    down = {"inner_ptr": dtype, "weight_ptr": dtype, "y_ptr": dtype} | strides | _LISTS | bias

    cases = []
    for precision, targets in PRECISIONS:
        own = dict(experts.expert_constants(tile, num_experts, sizes))
        own |= {"COMPUTE": COMPUTE[dtype], "PRECISION": precision}
        own |= dict.fromkeys({"bias_ptr"} - bias.keys())
        clamps = {"TOP_K": top_k, "CLAMPED": bool(bias)}
        stages = min(tile.num_stages, AMD_STAGES) if targets == AMD else tile.num_stages
        for name, kernel, types, more in (
            ("gate and up", experts.gate_up_kernel, up, clamps),
            ("down", experts.down_kernel, down, {}),
        ):
            case = KernelCase(
                name=f"fused_experts: {name}, {what}",
                kernel=kernel,
                types=types,
                constexprs=own | more,
                num_warps=tile.num_warps,
                num_stages=stages,
                targets=targets,
            )
            cases.append(case)
    return tuple(cases)
