"""The ctypes structs of recurrent operations; `dovetail_states.h` defines them."""

from __future__ import annotations

import ctypes

_POINTER, _INT64, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float

MAX_CONV_WIDTH = 64
"""The maximum width of a convolution, `DK_MAX_CONV_WIDTH`."""


class StateParts(ctypes.Structure):
    """The struct `dk_state_parts`."""

    _fields_ = (
        ("sizes", _POINTER),
        ("num_parts", _POINTER),
        ("reads", _POINTER),
        ("writes", _POINTER),
        ("num_requests", _POINTER),
    )


class CausalConvArgs(ctypes.Structure):
    """The struct `dk_causal_conv_args`."""

    _fields_ = (
        ("parts", _POINTER),
        ("x", _POINTER),
        ("weight", _POINTER),
        ("bias", _POINTER),
        ("states", _POINTER),
        ("y", _POINTER),
        ("channels", _INT64),
        ("width", _INT64),
        ("x_stride", _INT64),
        ("weight_stride", _INT64),
        ("block_stride", _INT64),
        ("y_stride", _INT64),
        ("is_plain", _INT64),
        ("is_float32", _INT64),
    )


class LinearAttentionArgs(ctypes.Structure):
    """The struct `dk_linear_attention_args`."""

    _fields_ = (
        ("parts", _POINTER),
        ("q", _POINTER),
        ("k", _POINTER),
        ("v", _POINTER),
        ("steps", _POINTER),
        ("betas", _POINTER),
        ("step_bias", _POINTER),
        ("rates", _POINTER),
        ("skip", _POINTER),
        ("states", _POINTER),
        ("y", _POINTER),
        ("num_heads", _INT64),
        ("num_groups", _INT64),
        ("key_size", _INT64),
        ("value_size", _INT64),
        ("q_stride", _INT64),
        ("k_stride", _INT64),
        ("v_stride", _INT64),
        ("steps_stride", _INT64),
        ("betas_stride", _INT64),
        ("block_stride", _INT64),
        ("is_float32", _INT64),
        ("min_step", _FLOAT),
        ("max_step", _FLOAT),
        ("key_eps", _FLOAT),
    )


class GatedRecurrenceArgs(ctypes.Structure):
    """The struct `dk_gated_recurrence_args`."""

    _fields_ = (
        ("parts", _POINTER),
        ("x", _POINTER),
        ("input_gates", _POINTER),
        ("decay_gates", _POINTER),
        ("input_bias", _POINTER),
        ("decay_bias", _POINTER),
        ("rates", _POINTER),
        ("states", _POINTER),
        ("y", _POINTER),
        ("channels", _INT64),
        ("x_stride", _INT64),
        ("input_gates_stride", _INT64),
        ("decay_gates_stride", _INT64),
        ("block_stride", _INT64),
        ("y_stride", _INT64),
        ("is_float32", _INT64),
    )
