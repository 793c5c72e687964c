"""Norms, rotary embedding and activation of FlashInfer in torch.

Only the factories of the kernel modules are replaced. Each function raises ValueError for an
argument that the real kernel misreads: other dtypes, strides that it ignores, unaligned rows, sizes
that do not consist of complete vectors, and empty inputs, for which a launch fails.

Import this module only in a separate process, because the replacements are not undone.

Shape legend: R rows, H heads, D features, S head size, P positions.
"""

from __future__ import annotations

from importlib import import_module
from math import gcd
from types import SimpleNamespace

import torch
from reference_attention import named, require
from reference_kernels import native_arguments

norm = import_module("flashinfer.norm")
rope = import_module("flashinfer.rope")
activation = import_module("flashinfer.activation")

NORMS = ("rmsnorm", "gemma_rmsnorm", "fused_add_rmsnorm", "gemma_fused_add_rmsnorm")
ROTATE = "apply_rope_pos_ids_cos_sin_cache"
OP_NAMES = {
    **{name: native_arguments("norm.cu", name) for name in NORMS},
    ROTATE: native_arguments("rope.cu", ROTATE),
}
ROPE_VECTORS = {64: 8, 128: 8, 256: 8, 512: 16}
"""Features of a thread of the rotary kernel, by head size; 16 for others."""

op_calls: list[str] = []
"""Names of the launched kernels."""


def check_rows(name: str, x: torch.Tensor, num_bytes: int) -> None:
    """Check dtype, last stride and alignment of the rows of a tensor that is not empty."""
    require(x.dtype in (torch.bfloat16, torch.float16), f"{name} is {x.dtype}")
    require(x.numel() > 0, f"{name} is empty")
    require(x.stride(-1) == 1, f"the last stride of {name} is {x.stride(-1)}")
    starts = [x.data_ptr(), *(x.element_size() * stride for stride in x.stride()[:-1])]
    require(not any(start % num_bytes for start in starts), f"{name} is not aligned")


def normalized(x: torch.Tensor, weight_D: torch.Tensor, eps: float, bias: float) -> torch.Tensor:
    """Return the norm of float32 rows."""
    factor = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * factor * (bias + weight_D.float())


def norm_kernel(name: str, bias: float):
    """Return the function of a norm."""

    def run(*args: object) -> None:
        op_calls.append(name)
        run = named(OP_NAMES[name], args)
        out, x, weight_D = run.output, run.input, run.weight
        require(x.dim() in (2, 3) and out.shape == x.shape, f"shapes {x.shape}, {out.shape}")
        num_bytes = gcd(16, 2 * x.shape[-1])
        for what, tensor in (("output", out), ("input", x), ("weight", weight_D)):
            check_rows(what, tensor, num_bytes)
            require(tensor.dtype == x.dtype, f"{what} is {tensor.dtype}, not {x.dtype}")
        require(weight_D.shape == x.shape[-1:], "the weight has a different size")
        out.copy_(normalized(x.float(), weight_D, run.eps, bias))

    return run


def add_norm_kernel(name: str, bias: float):
    """Return the function of a norm with a residual, which computes in place."""

    def run(*args: object) -> None:
        op_calls.append(name)
        run = named(OP_NAMES[name], args)
        x, residual, weight_D = run.input, run.residual, run.weight
        require(x.dim() == residual.dim() == 2 and x.shape == residual.shape, "two dimensions")
        num_bytes = gcd(16, 2 * x.shape[-1])
        for what, tensor in (("input", x), ("residual", residual), ("weight", weight_D)):
            check_rows(what, tensor, num_bytes)
            require(tensor.dtype == x.dtype, f"{what} is {tensor.dtype}, not {x.dtype}")
        require(weight_D.shape == x.shape[-1:], "the weight has a different size")
        total = x.float() + residual.float()  # the norm is computed before the sum is rounded
        residual.copy_(total)
        x.copy_(normalized(total, weight_D, run.eps, bias))

    return run


def rotate(*args: object) -> None:
    """Rotate queries and keys like the kernel, whose sizes must consist of complete vectors."""
    op_calls.append(ROTATE)
    run = named(OP_NAMES[ROTATE], args)
    table, positions = run.cos_sin_cache, run.pos_ids
    require(not run.interleave, "the layout of rotated features is interleaved")
    require(table.dtype == torch.float32 and table.is_contiguous(), "the table: float32, dense")
    require(positions.is_contiguous() and positions.dtype in (torch.int32, torch.int64), "pos_ids")
    require(len(positions) == run.q.shape[0] == run.k.shape[0], "numbers of tokens differ")
    head_size, rotary_dim = run.q.shape[-1], table.shape[1]
    vector = ROPE_VECTORS.get(head_size, 16)
    require(rotary_dim % (2 * vector) == 0, f"half of {rotary_dim} features in vectors of {vector}")
    require(head_size in ROPE_VECTORS or head_size == rotary_dim, "an unusual size, rotated partly")
    cos_RF, sin_RF = table[positions.long()].chunk(2, dim=-1)
    for what, x, out in (("q", run.q, run.q_rope), ("k", run.k, run.k_rope)):
        check_rows(what, x, 16)
        check_rows(f"{what}_rope", out, 16)
        require(x.dtype == run.q.dtype == out.dtype, "dtypes differ")
        left, right = x[..., :rotary_dim].float().chunk(2, dim=-1)
        turned = (
            left * cos_RF[:, None] - right * sin_RF[:, None],
            right * cos_RF[:, None] + left * sin_RF[:, None],
        )
        out.copy_(torch.cat((*turned, x[..., rotary_dim:].float()), dim=-1))


def activate(out: torch.Tensor, x: torch.Tensor, enable_pdl: bool) -> None:
    """Compute silu(first half) · second half, like the kernel in contiguous memory."""
    op_calls.append("silu_and_mul")
    num_bytes = gcd(16, 2 * out.shape[-1])
    for what, tensor in (("input", x), ("output", out)):
        check_rows(what, tensor, num_bytes)
        require(tensor.is_contiguous(), f"the strides of {what} are ignored")
        require(tensor.dtype == x.dtype, f"{what} is {tensor.dtype}, not {x.dtype}")
    gate, up = x.float().chunk(2, dim=-1)
    out.copy_(gate * gate.sigmoid() * up)


def install() -> None:
    """Replace the compiled kernels."""
    norms = SimpleNamespace(
        rmsnorm=norm_kernel("rmsnorm", 0.0),
        gemma_rmsnorm=norm_kernel("gemma_rmsnorm", 1.0),
        fused_add_rmsnorm=add_norm_kernel("fused_add_rmsnorm", 0.0),
        gemma_fused_add_rmsnorm=add_norm_kernel("gemma_fused_add_rmsnorm", 1.0),
    )
    rotary = SimpleNamespace(apply_rope_pos_ids_cos_sin_cache=rotate)
    activations = {"silu": SimpleNamespace(silu_and_mul=activate)}
    # Without CuTe DSL, which tests do not install, FlashInfer uses its CUDA kernels.
    norm._use_cuda_norm = lambda device: True
    norm.get_norm_module = lambda: norms
    rope.get_rope_module = lambda: rotary
    activation.get_act_and_mul_module = activations.__getitem__
