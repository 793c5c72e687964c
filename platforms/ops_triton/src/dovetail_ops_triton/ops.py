"""The op provider `triton`: fused operations in Triton kernels.

It does not depend on a model or a platform. Triton is imported when the ops are created, not with
this module, so that a missing Triton can be reported.
Dimensions: T tokens, D features of the last dimension, H heads, K key-value heads, S head size,
P positions; R rows and V width of logits or of an embedding's table.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from dovetail.interfaces.ops import (
    DrawColumns,
    ExpertRouting,
    ExpertWeights,
    GatedRecurrenceInputs,
    LatentWeights,
    LinearAttentionInputs,
    Ops,
    RouterWeights,
    StateParts,
    StepColumns,
)
from dovetail_ops_triton.availability import INTERPRETED


class TritonOps(Ops):
    """Computes in float32 on bfloat16, float16 or float32 tensors. Results are contiguous.

    No call waits for the device. If features are not contiguous, they are copied first; otherwise a
    call allocates its results, and more only if its docstring says so. A row's result is bitwise
    independent of other rows, except for `fused_experts`, whose tiles depend on the number of
    tokens, and `linear_attention`, whose chunks begin at the start of a step.
    """

    device_types: ClassVar[frozenset[str]] = frozenset(("cuda", "xpu") + ("cpu",) * INTERPRETED)
    batch_invariant: ClassVar[frozenset[str]] = frozenset({"bfloat16", "float16", "float32"})
    batch_dependent: ClassVar[frozenset[str]] = frozenset({"fused_experts", "linear_attention"})

    def __init__(self) -> None:
        from dovetail_ops_triton import kernels

        self._kernels = kernels

    def rms_norm(self, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        """Return x / sqrt(mean(x²) + eps) · weight, a new tensor.

        x may have any leading dimensions.
        """
        return self._kernels.rms_norm(x_TD, weight_D, eps)

    def add_rms_norm(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (rms_norm(x + residual), x + residual). The sum is stored in `residual_TD`."""
        return self._kernels.add_rms_norm(x_TD, residual_TD, weight_D, eps)

    def layer_norm(
        self,
        x_TD: torch.Tensor,
        weight_D: torch.Tensor | None,
        bias_D: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        """Return (x - mean) / sqrt(variance + eps) · weight + bias, a new tensor.

        x may have any leading dimensions.
        """
        return self._kernels.layer_norm(x_TD, weight_D, bias_D, eps)

    def add_layer_norm(
        self,
        x_TD: torch.Tensor,
        residual_TD: torch.Tensor,
        weight_D: torch.Tensor | None,
        bias_D: torch.Tensor | None,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (layer_norm(x + residual), x + residual). The sum is stored in `residual_TD`."""
        return self._kernels.add_layer_norm(x_TD, residual_TD, weight_D, bias_D, eps)

    def offset_rms_norm(
        self, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Return x / sqrt(mean(x²) + eps) · (1 + weight), a new tensor. Any leading dimensions."""
        return self._kernels.rms_norm(x_TD, weight_D, eps, offset=1.0)

    def add_offset_rms_norm(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the norm of x + residual, and the sum, which is stored in `residual_TD`."""
        return self._kernels.add_rms_norm(x_TD, residual_TD, weight_D, eps, offset=1.0)

    def gated_rms_norm(
        self,
        x_TGI: torch.Tensor,
        gate_TGI: torch.Tensor,
        weight_GI: torch.Tensor,
        eps: float,
        *,
        norm_first: bool,
    ) -> torch.Tensor:
        """Return the gated RMS norm of x, a new tensor [T, G, I]."""
        return self._kernels.gated_rms_norm(x_TGI, gate_TGI, weight_GI, eps, norm_first=norm_first)

    def rotary_embedding(
        self,
        q_THS: torch.Tensor,
        k_TKS: torch.Tensor,
        positions_T: torch.Tensor,
        cos_sin_PS: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return q and k, rotated by their positions (NeoX style). Two new tensors."""
        return self._kernels.rotate(q_THS, k_TKS, positions_T, cos_sin_PS)

    def silu_and_mul(self, x_T2D: torch.Tensor) -> torch.Tensor:
        """Return silu(first half of the last dimension) · second half, a new tensor."""
        return self._kernels.silu_and_mul(x_T2D)

    def sigmoid_and_mul(self, x_TD: torch.Tensor, gate_TD: torch.Tensor) -> torch.Tensor:
        """Return x · sigmoid(gate), a new tensor. Any leading dimensions."""
        return self._kernels.sigmoid_and_mul(x_TD, gate_TD)

    def gelu_tanh_and_mul(self, x_TD: torch.Tensor, gate_TD: torch.Tensor) -> torch.Tensor:
        """Return x · gelu(gate), with the tanh approximation, a new tensor.

        Any leading dimensions.
        """
        return self._kernels.gelu_tanh_and_mul(x_TD, gate_TD)

    def scale(self, x_TD: torch.Tensor, factor: float) -> torch.Tensor:
        """Return x · factor, a new tensor. Any leading dimensions."""
        return self._kernels.scale(x_TD, factor)

    def soft_cap(self, logits_RV: torch.Tensor, cap: float) -> torch.Tensor:
        """Return cap · tanh(logits / cap), a new tensor."""
        return self._kernels.soft_cap(logits_RV, cap)

    def latent_inputs(
        self,
        q_THF: torch.Tensor,
        latent_TF: torch.Tensor,
        weights: LatentWeights,
        positions_T: torch.Tensor,
        cos_sin_PR: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries [T, H, L + R] and keys [T, 1, L + R] of latent attention, new tensors."""
        return self._kernels.latent_inputs(q_THF, latent_TF, weights, positions_T, cos_sin_PR)

    def head_linear(self, x_THI: torch.Tensor, weight_HOI: torch.Tensor) -> torch.Tensor:
        """Return x · Wᵀ of each head, a new tensor [T, H, O]."""
        return self._kernels.head_linear(x_THI, weight_HOI)

    def select_experts(
        self, x_TD: torch.Tensor, router: RouterWeights, routing: ExpertRouting
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the experts of each token, int64 [T, K], best first, and their weights, float32.

        Of equal experts, the first is selected. The logits are allocated, too.
        """
        return self._kernels.select_experts(x_TD, router, routing)

    def fused_experts(
        self,
        x_TD: torch.Tensor,
        experts_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        layer: ExpertWeights,
    ) -> torch.Tensor:
        """Return the weighted sum of the outputs of each token's experts, a new tensor [T, D].

        The activations and outputs of all experts are allocated, too.
        """
        return self._kernels.fused_experts(x_TD, experts_TK, weights_TK, layer)

    def add_shared_expert(
        self,
        y_TD: torch.Tensor,
        shared_TD: torch.Tensor,
        x_TD: torch.Tensor,
        gate_D: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return y + shared, or with a gate y + sigmoid(x · gate) · shared, a new tensor."""
        return self._kernels.add_shared_expert(y_TD, shared_TD, x_TD, gate_D)

    def causal_conv(
        self,
        x_TC: torch.Tensor,
        weight_CW: torch.Tensor,
        bias_C: torch.Tensor | None,
        states_BWC: torch.Tensor,
        parts: StateParts,
    ) -> torch.Tensor:
        """Return silu(convolution + bias), a new tensor [T, C], and update the states."""
        return self._kernels.causal_conv(x_TC, weight_CW, bias_C, states_BWC, parts)

    def plain_causal_conv(
        self,
        x_TC: torch.Tensor,
        weight_CW: torch.Tensor,
        bias_C: torch.Tensor | None,
        states_BWC: torch.Tensor,
        parts: StateParts,
    ) -> torch.Tensor:
        """Return convolution + bias, a new tensor [T, C], and update the states."""
        return self._kernels.causal_conv(
            x_TC, weight_CW, bias_C, states_BWC, parts, activated=False
        )

    def linear_attention(
        self, inputs: LinearAttentionInputs, states_BHKV: torch.Tensor, parts: StateParts
    ) -> torch.Tensor:
        """Return the outputs of linear attention, a new float32 tensor, and update the states.

        Requests with several tokens need 80 bytes for each token and head, or 144 with the delta
        rule.
        """
        return self._kernels.linear_attention(inputs, states_BHKV, parts)

    def gated_recurrence(
        self, inputs: GatedRecurrenceInputs, states_BC: torch.Tensor, parts: StateParts
    ) -> torch.Tensor:
        """Return the states after each token, a new tensor [T, C], and update the states."""
        return self._kernels.gated_recurrence(inputs, states_BC, parts)

    def embedding(self, ids_T: torch.Tensor, table_VD: torch.Tensor) -> torch.Tensor:
        """Return the rows of these ids as a new tensor."""
        return self._kernels.look_up(ids_T, table_VD)

    def best_tokens(self, logits_RV: torch.Tensor) -> torch.Tensor:
        """Return the argmax of each row, int64 [R]. The first column if several are equal."""
        return self._kernels.find_best(logits_RV)

    def draw_tokens(self, logits_RV: torch.Tensor, columns: DrawColumns) -> torch.Tensor:
        """Return one token per row, int64 [R], as the contract specifies. Logits are only read.

        A NaN is sampled like the most likely token. Tokens with a probability below 2^-32 are not
        distinguished.
        """
        return self._kernels.draw_columns(logits_RV, columns)

    def prepare_inputs(self, columns: StepColumns) -> None:
        """Fill the output fields of `columns`, as the contract specifies."""
        self._kernels.prepare_inputs(columns)
