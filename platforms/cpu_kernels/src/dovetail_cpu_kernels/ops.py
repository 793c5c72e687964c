"""The ctypes structs of norms, rotary embedding, activation and other small operations.

The headers `dovetail_ops.h` and `dovetail_sampling.h` define the structs. `OPS` also contains those
of `dovetail_experts.h` and `dovetail_states.h`.

A struct is filled once and reused; between calls only changed fields are set. Addresses are
integers, such as `tensor.data_ptr()`; the owner of the memory must keep it alive.
"""

from __future__ import annotations

import ctypes

from dovetail_cpu_kernels.experts import ExpertsArgs, SelectExpertsArgs
from dovetail_cpu_kernels.library import native_operation
from dovetail_cpu_kernels.states import CausalConvArgs, GatedRecurrenceArgs, LinearAttentionArgs

_POINTER, _INT64, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class RMSNormArgs(ctypes.Structure):
    """The struct `dk_rms_norm_args`."""

    _fields_ = (
        ("x", _POINTER),
        ("y", _POINTER),
        ("num_outer", _INT64),
        ("num_inner", _INT64),
        ("x_outer_stride", _INT64),
        ("x_inner_stride", _INT64),
        ("y_outer_stride", _INT64),
        ("y_inner_stride", _INT64),
        ("weight", _POINTER),
        ("size", _INT64),
        ("eps", _FLOAT),
        ("weight_offset", _FLOAT),
    )


class AddRMSNormArgs(ctypes.Structure):
    """The struct `dk_add_rms_norm_args`."""

    _fields_ = (
        ("x", _POINTER),
        ("residual", _POINTER),
        ("y", _POINTER),
        ("num_rows", _INT64),
        ("x_stride", _INT64),
        ("residual_stride", _INT64),
        ("y_stride", _INT64),
        ("weight", _POINTER),
        ("size", _INT64),
        ("eps", _FLOAT),
        ("weight_offset", _FLOAT),
    )


class LayerNormArgs(ctypes.Structure):
    """The struct `dk_layer_norm_args`."""

    _fields_ = (
        ("x", _POINTER),
        ("residual", _POINTER),
        ("y", _POINTER),
        ("num_rows", _INT64),
        ("x_stride", _INT64),
        ("residual_stride", _INT64),
        ("y_stride", _INT64),
        ("weight", _POINTER),
        ("bias", _POINTER),
        ("size", _INT64),
        ("eps", _FLOAT),
    )


class RotaryArgs(ctypes.Structure):
    """The struct `dk_rotary_args`."""

    _fields_ = (
        ("q", _POINTER),
        ("k", _POINTER),
        ("q_out", _POINTER),
        ("k_out", _POINTER),
        ("positions", _POINTER),
        ("num_tokens", _INT64),
        ("q_token_stride", _INT64),
        ("q_head_stride", _INT64),
        ("k_token_stride", _INT64),
        ("k_head_stride", _INT64),
        ("q_out_token_stride", _INT64),
        ("q_out_head_stride", _INT64),
        ("k_out_token_stride", _INT64),
        ("k_out_head_stride", _INT64),
        ("cos_sin", _POINTER),
        ("num_heads", _INT64),
        ("num_kv_heads", _INT64),
        ("head_size", _INT64),
        ("rotary_dim", _INT64),
    )


class SiluMulArgs(ctypes.Structure):
    """The struct `dk_silu_mul_args`."""

    _fields_ = (
        ("x", _POINTER),
        ("y", _POINTER),
        ("num_rows", _INT64),
        ("x_stride", _INT64),
        ("y_stride", _INT64),
        ("size", _INT64),
    )


class EmbeddingArgs(ctypes.Structure):
    """The struct `dk_embedding_args`."""

    _fields_ = (
        ("ids", _POINTER),
        ("y", _POINTER),
        ("num_tokens", _INT64),
        ("y_stride", _INT64),
        ("table", _POINTER),
        ("table_stride", _INT64),
        ("size", _INT64),
    )


class GatedNormArgs(ctypes.Structure):
    """The struct `dk_gated_norm_args`."""

    _fields_ = (
        ("x", _POINTER),
        ("gate", _POINTER),
        ("weight", _POINTER),
        ("y", _POINTER),
        ("num_tokens", _INT64),
        ("num_groups", _INT64),
        ("size", _INT64),
        ("gate_stride", _INT64),
        ("weight_stride", _INT64),
        ("norm_first", _INT64),
        ("eps", _FLOAT),
    )


class ScaleArgs(ctypes.Structure):
    """The struct `dk_scale_args`."""

    _fields_ = (
        ("x", _POINTER),
        ("num_rows", _INT64),
        ("size", _INT64),
        ("stride", _INT64),
        ("is_float32", _INT64),
        ("factor", _FLOAT),
    )


class GateMulArgs(ctypes.Structure):
    """The struct `dk_gate_mul_args`."""

    _fields_ = (
        ("x", _POINTER),
        ("gate", _POINTER),
        ("y", _POINTER),
        ("num_rows", _INT64),
        ("size", _INT64),
        ("x_stride", _INT64),
        ("gate_stride", _INT64),
        ("y_stride", _INT64),
    )


class AddSharedArgs(ctypes.Structure):
    """The struct `dk_add_shared_args`."""

    _fields_ = (
        ("y", _POINTER),
        ("shared", _POINTER),
        ("x", _POINTER),
        ("gate", _POINTER),
        ("num_tokens", _INT64),
        ("size", _INT64),
        ("y_stride", _INT64),
        ("shared_stride", _INT64),
        ("x_stride", _INT64),
    )


class HeadLinearArgs(ctypes.Structure):
    """The struct `dk_head_linear_args`."""

    _fields_ = (
        ("x", _POINTER),
        ("weight", _POINTER),
        ("y", _POINTER),
        ("num_tokens", _INT64),
        ("num_heads", _INT64),
        ("num_inputs", _INT64),
        ("num_outputs", _INT64),
        ("x_stride", _INT64),
        ("x_head_stride", _INT64),
        ("y_stride", _INT64),
        ("y_head_stride", _INT64),
        ("weight_head_stride", _INT64),
        ("weight_stride", _INT64),
        ("inputs_first", _INT64),
    )


class ArgmaxArgs(ctypes.Structure):
    """The struct `dk_argmax_args`."""

    _fields_ = (
        ("logits", _POINTER),
        ("ids", _POINTER),
        ("logsumexp", _POINTER),
        ("num_rows", _INT64),
        ("stride", _INT64),
        ("size", _INT64),
        ("is_float32", _INT64),
    )


class MaskArgs(ctypes.Structure):
    """The struct `dk_mask_args`."""

    _fields_ = (
        ("logits", _POINTER),
        ("rows", _POINTER),
        ("bits", _POINTER),
        ("num_rows", _INT64),
        ("stride", _INT64),
        ("size", _INT64),
        ("row_bytes", _INT64),
        ("is_float32", _INT64),
    )


OPS: dict[str, type[ctypes.Structure]] = {
    "rms_norm": RMSNormArgs,
    "add_rms_norm": AddRMSNormArgs,
    "layer_norm": LayerNormArgs,
    "rotary": RotaryArgs,
    "silu_mul": SiluMulArgs,
    "embedding": EmbeddingArgs,
    "gated_norm": GatedNormArgs,
    "sigmoid_mul": GateMulArgs,
    "gelu_tanh_mul": GateMulArgs,
    "scale": ScaleArgs,
    "soft_cap": ScaleArgs,
    "add_shared": AddSharedArgs,
    "head_linear": HeadLinearArgs,
    "argmax": ArgmaxArgs,
    "mask": MaskArgs,
    "select_experts": SelectExpertsArgs,
    "experts": ExpertsArgs,
    "causal_conv": CausalConvArgs,
    "linear_attention": LinearAttentionArgs,
    "gated_recurrence": GatedRecurrenceArgs,
}
"""The struct of each operation, by the operation's name."""


def op(name: str) -> ctypes._NamedFuncPointer:
    """Return the operation `name` of `OPS`: call it with the address of its struct."""
    if name not in OPS:
        raise ValueError(
            f"the operation {name!r} does not exist; the operations are {', '.join(OPS)}"
        )
    return native_operation(name)
