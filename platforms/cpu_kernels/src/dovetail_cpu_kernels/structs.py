"""The structs of the C ABI with their names in the headers: `library` compares their sizes."""

from __future__ import annotations

import ctypes

from dovetail_cpu_kernels.attention import (
    AttentionArgs,
    AttentionBatchSize,
    AttentionWork,
    BidirectionalArgs,
)
from dovetail_cpu_kernels.experts import ExpertsArgs, SelectExpertsArgs
from dovetail_cpu_kernels.linear import LinearArgs, PackLinearArgs
from dovetail_cpu_kernels.ops import (
    AddRMSNormArgs,
    AddSharedArgs,
    ArgmaxArgs,
    EmbeddingArgs,
    GatedNormArgs,
    GateMulArgs,
    HeadLinearArgs,
    LayerNormArgs,
    MaskArgs,
    RMSNormArgs,
    RotaryArgs,
    ScaleArgs,
    SiluMulArgs,
)
from dovetail_cpu_kernels.probe import ProbeMultiplyArgs, ProbeReadArgs
from dovetail_cpu_kernels.states import (
    CausalConvArgs,
    GatedRecurrenceArgs,
    LinearAttentionArgs,
    StateParts,
)

STRUCTS: dict[str, type[ctypes.Structure]] = {
    "dk_attention_batch": AttentionBatchSize,
    "dk_attention_args": AttentionArgs,
    "dk_attention_work": AttentionWork,
    "dk_bidirectional_args": BidirectionalArgs,
    "dk_pack_linear_args": PackLinearArgs,
    "dk_linear_args": LinearArgs,
    "dk_probe_read_args": ProbeReadArgs,
    "dk_probe_multiply_args": ProbeMultiplyArgs,
    "dk_rms_norm_args": RMSNormArgs,
    "dk_add_rms_norm_args": AddRMSNormArgs,
    "dk_layer_norm_args": LayerNormArgs,
    "dk_rotary_args": RotaryArgs,
    "dk_silu_mul_args": SiluMulArgs,
    "dk_gate_mul_args": GateMulArgs,
    "dk_embedding_args": EmbeddingArgs,
    "dk_gated_norm_args": GatedNormArgs,
    "dk_scale_args": ScaleArgs,
    "dk_add_shared_args": AddSharedArgs,
    "dk_head_linear_args": HeadLinearArgs,
    "dk_argmax_args": ArgmaxArgs,
    "dk_mask_args": MaskArgs,
    "dk_select_experts_args": SelectExpertsArgs,
    "dk_experts_args": ExpertsArgs,
    "dk_state_parts": StateParts,
    "dk_causal_conv_args": CausalConvArgs,
    "dk_linear_attention_args": LinearAttentionArgs,
    "dk_gated_recurrence_args": GatedRecurrenceArgs,
}
"""The structs, by the names that `dk_struct_bytes` expects."""
