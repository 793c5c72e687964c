"""Kernels, and the functions that launch them, from tensors to tensors. This module imports Triton.

This module does not depend on contracts or on the choice of a provider.
"""

from dovetail_ops_triton.kernels.best_columns import find_best
from dovetail_ops_triton.kernels.drawing import draw_columns
from dovetail_ops_triton.kernels.elementwise import scale, silu_and_mul, soft_cap
from dovetail_ops_triton.kernels.embedding import look_up
from dovetail_ops_triton.kernels.experts import fused_experts
from dovetail_ops_triton.kernels.gates import (
    add_shared_expert,
    gated_rms_norm,
    gelu_tanh_and_mul,
    sigmoid_and_mul,
)
from dovetail_ops_triton.kernels.head_products import head_linear
from dovetail_ops_triton.kernels.latent_rows import latent_inputs
from dovetail_ops_triton.kernels.layer_norms import add_layer_norm, layer_norm
from dovetail_ops_triton.kernels.norms import add_rms_norm, rms_norm
from dovetail_ops_triton.kernels.rotary import rotate
from dovetail_ops_triton.kernels.routing import select_experts
from dovetail_ops_triton.kernels.states.convolution import causal_conv
from dovetail_ops_triton.kernels.states.linear_states import linear_attention
from dovetail_ops_triton.kernels.states.recurrence import gated_recurrence
from dovetail_ops_triton.kernels.step_inputs import prepare_inputs

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "add_shared_expert",
    "causal_conv",
    "draw_columns",
    "find_best",
    "fused_experts",
    "gated_recurrence",
    "gated_rms_norm",
    "gelu_tanh_and_mul",
    "head_linear",
    "latent_inputs",
    "layer_norm",
    "linear_attention",
    "look_up",
    "prepare_inputs",
    "rms_norm",
    "rotate",
    "scale",
    "select_experts",
    "sigmoid_and_mul",
    "silu_and_mul",
    "soft_cap",
]
