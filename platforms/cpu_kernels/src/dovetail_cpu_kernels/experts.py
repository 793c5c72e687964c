"""Routers and experts as ctypes structs (see `dovetail_experts.h`).

A struct is filled once and reused; between calls only changed fields are set. Addresses are
integers, such as `tensor.data_ptr()`; the owner of the memory must keep it alive.
"""

from __future__ import annotations

import ctypes

_POINTER, _INT64, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class SelectExpertsArgs(ctypes.Structure):
    """The struct `dk_select_experts_args`."""

    _fields_ = (
        ("x", _POINTER),
        ("weight", _POINTER),
        ("bias", _POINTER),
        ("correction", _POINTER),
        ("experts", _POINTER),
        ("weights", _POINTER),
        ("num_tokens", _INT64),
        ("num_experts", _INT64),
        ("size", _INT64),
        ("x_stride", _INT64),
        ("weight_stride", _INT64),
        ("top_k", _INT64),
        ("num_groups", _INT64),
        ("top_groups", _INT64),
        ("sigmoid", _INT64),
        ("renormalize", _INT64),
        ("scale", _FLOAT),
    )


class ExpertsArgs(ctypes.Structure):
    """The struct `dk_experts_args`."""

    _fields_ = (
        ("x", _POINTER),
        ("experts", _POINTER),
        ("weights", _POINTER),
        ("gate_up", _POINTER),
        ("gate_up_bias", _POINTER),
        ("down", _POINTER),
        ("down_bias", _POINTER),
        ("y", _POINTER),
        ("num_tokens", _INT64),
        ("num_experts", _INT64),
        ("top_k", _INT64),
        ("size", _INT64),
        ("inner", _INT64),
        ("x_stride", _INT64),
        ("y_stride", _INT64),
        ("gate_up_kind", _INT64),
        ("gate_up_group", _INT64),
        ("down_kind", _INT64),
        ("down_group", _INT64),
        ("limit", _FLOAT),
        ("alpha", _FLOAT),
    )
