"""The op provider `torch`: norms, rotary embedding and activation with torch operations.

It is the reference for fused providers. It has no state and runs on any device.
Dimensions: T tokens, D features of the last dimension, H heads, K key-value heads, S head size,
P positions, F half of rotary_dim, N query and key-value heads together; R rows and V width of
logits or of an embedding's table.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from dovetail.interfaces.ops import (
    ExpertRouting,
    ExpertWeights,
    GatedRecurrenceInputs,
    LatentWeights,
    LinearAttentionInputs,
    Ops,
    RouterWeights,
    StateParts,
    StepColumns,
    overridden_operations,
)
from dovetail_torch.layers.expert_groups import apply_experts, select_experts
from dovetail_torch.layers.recurrence import gated_recurrence
from dovetail_torch.layers.state_ops import (
    causal_conv,
    gated_rms_norm,
    linear_attention,
    plain_causal_conv,
)
from dovetail_torch.layers.step_inputs import prepare_inputs
from dovetail_torch.sampling.blocks import best_tokens
from dovetail_torch.sampling.grammar import mask_tokens


class TorchOps(Ops):
    """Computes the small operations with torch: float32 arithmetic, results in the inputs' dtype.

    It computes the operations that a provider does not override. The sampler implements sampling.
    """

    def rms_norm(self, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        """Return x / sqrt(mean(x²) + eps) · weight, a new tensor.

        x may have any leading dimensions.
        """
        return functional.rms_norm(x_TD, weight_D.shape, weight_D, eps)

    def add_rms_norm(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (rms_norm(x + residual), x + residual). The sum is stored in `residual_TD`."""
        residual_TD.add_(x_TD)
        return functional.rms_norm(residual_TD, weight_D.shape, weight_D, eps), residual_TD

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
        return functional.layer_norm(x_TD, x_TD.shape[-1:], weight_D, bias_D, eps)

    def add_layer_norm(
        self,
        x_TD: torch.Tensor,
        residual_TD: torch.Tensor,
        weight_D: torch.Tensor | None,
        bias_D: torch.Tensor | None,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (layer_norm(x + residual), x + residual). The sum is stored in `residual_TD`."""
        residual_TD.add_(x_TD)
        return self.layer_norm(residual_TD, weight_D, bias_D, eps), residual_TD

    def offset_rms_norm(
        self, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Return x / sqrt(mean(x²) + eps) · (1 + weight), a new tensor."""
        scale_D = weight_D.float() + 1
        return functional.rms_norm(x_TD.float(), scale_D.shape, scale_D, eps).to(x_TD.dtype)

    def add_offset_rms_norm(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the norm of x + residual, and the sum, which is stored in `residual_TD`."""
        residual_TD.add_(x_TD)
        return self.offset_rms_norm(residual_TD, weight_D, eps), residual_TD

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
        return gated_rms_norm(x_TGI, gate_TGI, weight_GI, eps, norm_first=norm_first)

    def rotary_embedding(
        self,
        q_THS: torch.Tensor,
        k_TKS: torch.Tensor,
        positions_T: torch.Tensor,
        cos_sin_PS: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return q and k, rotated by their positions (NeoX style). Views of one new tensor."""
        rotary_dim = cos_sin_PS.shape[-1]
        if rotary_dim < q_THS.shape[-1]:
            return self._rotate_partly(q_THS, k_TKS, positions_T, cos_sin_PS)
        # Rotating queries and keys together halves the calls, which dominate a decode step.
        heads_TNS = torch.cat((q_THS, k_TKS), dim=1).float()
        heads_TN2F = heads_TNS.view(*heads_TNS.shape[:2], 2, rotary_dim // 2)
        cos_T11F, sin_T11F = cos_sin_PS.index_select(0, positions_T)[:, None, None].chunk(2, dim=-1)
        signed_sin_T12F = torch.cat((-sin_T11F, sin_T11F), dim=-2)
        turned_TN2F = torch.addcmul(heads_TN2F * cos_T11F, heads_TN2F.flip(-2), signed_sin_T12F)
        turned_TNS = turned_TN2F.flatten(-2).to(q_THS.dtype)
        q_turned_THS, k_turned_TKS = turned_TNS.split_with_sizes(
            (q_THS.shape[1], k_TKS.shape[1]), dim=1
        )
        return q_turned_THS, k_turned_TKS

    def _rotate_partly(
        self,
        q_THS: torch.Tensor,
        k_TKS: torch.Tensor,
        positions_T: torch.Tensor,
        cos_sin_PS: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate the first features of each head and copy the rest."""
        size = cos_sin_PS.shape[-1]
        q_turned_THS, k_turned_TKS = self.rotary_embedding(
            q_THS[..., :size], k_TKS[..., :size], positions_T, cos_sin_PS
        )
        return (
            torch.cat((q_turned_THS, q_THS[..., size:]), dim=-1),
            torch.cat((k_turned_TKS, k_TKS[..., size:]), dim=-1),
        )

    def silu_and_mul(self, x_T2D: torch.Tensor) -> torch.Tensor:
        """Return silu(first half of the last dimension) · second half, a new tensor."""
        gate_TD, up_TD = x_T2D.chunk(2, dim=-1)
        return functional.silu(gate_TD).mul_(up_TD)

    def sigmoid_and_mul(self, x_TD: torch.Tensor, gate_TD: torch.Tensor) -> torch.Tensor:
        """Return x · sigmoid(gate), a new tensor."""
        return x_TD * gate_TD.sigmoid()

    def gelu_tanh_and_mul(self, x_TD: torch.Tensor, gate_TD: torch.Tensor) -> torch.Tensor:
        """Return x · gelu(gate), with the tanh approximation, a new tensor."""
        return functional.gelu(gate_TD, approximate="tanh").mul_(x_TD)

    def scale(self, x_TD: torch.Tensor, factor: float) -> torch.Tensor:
        """Return x · factor, stored in `x_TD`."""
        return x_TD.mul_(factor)

    def soft_cap(self, logits_RV: torch.Tensor, cap: float) -> torch.Tensor:
        """Return cap · tanh(logits / cap), a new tensor."""
        return (logits_RV / cap).tanh_().mul_(cap)

    def latent_inputs(
        self,
        q_THF: torch.Tensor,
        latent_TF: torch.Tensor,
        weights: LatentWeights,
        positions_T: torch.Tensor,
        cos_sin_PR: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries [T, H, L + R] and keys [T, 1, L + R] of latent attention, new tensors."""
        _, num_features, rank = weights.key_HNL.shape
        q_THN, q_THR = q_THF.tensor_split([num_features], dim=-1)
        latent_TL, k_TR = latent_TF.tensor_split([rank], dim=-1)
        latent_TL = self.rms_norm(latent_TL.contiguous(), weights.norm_L, weights.eps)
        q_THR, k_T1R = self.rotary_embedding(q_THR, k_TR.unsqueeze(1), positions_T, cos_sin_PR)
        q_THL = self.head_linear(q_THN, weights.key_HNL.mT)
        keys = torch.cat((latent_TL.unsqueeze(1), k_T1R), dim=-1)
        return torch.cat((q_THL, q_THR), dim=-1), keys

    def head_linear(self, x_THI: torch.Tensor, weight_HOI: torch.Tensor) -> torch.Tensor:
        """Return x · Wᵀ of each head, a new tensor [T, H, O]."""
        y_HTO = torch.bmm(x_THI.transpose(0, 1), weight_HOI.mT)
        return y_HTO.transpose(0, 1).contiguous()

    def add_shared_expert(
        self,
        y_TD: torch.Tensor,
        shared_TD: torch.Tensor,
        x_TD: torch.Tensor,
        gate_D: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return y + shared, or with a gate y + sigmoid(x · gate) · shared, a new tensor."""
        if gate_D is None:
            return y_TD + shared_TD
        return y_TD + shared_TD * functional.linear(x_TD, gate_D[None]).sigmoid()

    def select_experts(
        self, x_TD: torch.Tensor, router: RouterWeights, routing: ExpertRouting
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the experts of each token, int64 [T, K], and their weights, float32 [T, K]."""
        return select_experts(x_TD, router, routing)

    def fused_experts(
        self,
        x_TD: torch.Tensor,
        experts_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        layer: ExpertWeights,
    ) -> torch.Tensor:
        """Return the weighted sum of the outputs of each token's experts, a new tensor [T, D]."""
        return apply_experts(x_TD, experts_TK, weights_TK, layer)

    def causal_conv(
        self,
        x_TC: torch.Tensor,
        weight_CW: torch.Tensor,
        bias_C: torch.Tensor | None,
        states_BWC: torch.Tensor,
        parts: StateParts,
    ) -> torch.Tensor:
        """Return silu(convolution + bias), a new tensor [T, C], and update the states."""
        return causal_conv(x_TC, weight_CW, bias_C, states_BWC, parts)

    def plain_causal_conv(
        self,
        x_TC: torch.Tensor,
        weight_CW: torch.Tensor,
        bias_C: torch.Tensor | None,
        states_BWC: torch.Tensor,
        parts: StateParts,
    ) -> torch.Tensor:
        """Return convolution + bias, a new tensor [T, C], and update the states."""
        return plain_causal_conv(x_TC, weight_CW, bias_C, states_BWC, parts).to(x_TC.dtype)

    def linear_attention(
        self, inputs: LinearAttentionInputs, states_BHKV: torch.Tensor, parts: StateParts
    ) -> torch.Tensor:
        """Return the outputs of linear attention, a new tensor, and update the states."""
        return linear_attention(inputs, states_BHKV, parts)

    def gated_recurrence(
        self, inputs: GatedRecurrenceInputs, states_BC: torch.Tensor, parts: StateParts
    ) -> torch.Tensor:
        """Return the states after each token, a new tensor [T, C], and update the states."""
        return gated_recurrence(inputs, states_BC, parts)

    def embedding(self, ids_T: torch.Tensor, table_VD: torch.Tensor) -> torch.Tensor:
        """Return the rows of these ids as a new tensor."""
        return functional.embedding(ids_T, table_VD)

    def best_tokens(self, logits_RV: torch.Tensor) -> torch.Tensor:
        """Return the argmax of each row, int64 [R]. The first column if several are equal."""
        return best_tokens(logits_RV)

    def mask_tokens(
        self, logits_SV: torch.Tensor, rows_G: torch.Tensor, bits_GB: torch.Tensor
    ) -> None:
        """Set the logits of forbidden tokens to -inf, in place."""
        mask_tokens(logits_SV, rows_G, bits_GB)

    def prepare_inputs(self, columns: StepColumns) -> None:
        """Fill the output fields of `columns`. Only read other fields.

        Never waits for the device.
        """
        prepare_inputs(columns)


class CompletedOps(TorchOps):
    """Calls the operations that `provider` overrides, and torch's versions of all others."""

    def __init__(self, provider: Ops) -> None:
        self.provider = provider
        self.overridden = overridden_operations(type(provider))
        for name in self.overridden:
            setattr(self, name, getattr(provider, name))
