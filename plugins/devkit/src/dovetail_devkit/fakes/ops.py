"""A fake op provider that computes every operation in float64.

This module does not import torch. Dimensions: T tokens, D features, H query heads, K key-value
heads, S head size, P positions; R rows and V width of logits.
"""

from __future__ import annotations

import math
from itertools import accumulate
from random import Random
from typing import TYPE_CHECKING

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
from dovetail_devkit.ops.drawing_law import DrawParams, probabilities
from dovetail_devkit.ops.elementwise import exact_gelu_tanh
from dovetail_devkit.ops.experts import expert_sums, select
from dovetail_devkit.ops.latent_and_gates import exact_offset_norm
from dovetail_devkit.ops.recurrence import recur_gated
from dovetail_devkit.ops.states import convolve, normalize_gated, recur

if TYPE_CHECKING:
    import torch


class FakeOps(Ops):
    """Slow, correct versions of all ops. Every result is a new tensor of the input's dtype."""

    def rms_norm(self, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        """Return x / sqrt(mean(x²) + eps) · weight."""
        x = x_TD.double()
        scale = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        return (x * scale * weight_D.double()).to(x_TD.dtype)

    def add_rms_norm(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (rms_norm(x + residual), x + residual)."""
        sum_TD = (x_TD.double() + residual_TD.double()).to(x_TD.dtype)
        return self.rms_norm(sum_TD, weight_D, eps), sum_TD

    def layer_norm(
        self,
        x_TD: torch.Tensor,
        weight_D: torch.Tensor | None,
        bias_D: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        """Return (x - mean) / sqrt(variance + eps) · weight + bias."""
        x = x_TD.double() - x_TD.double().mean(-1, keepdim=True)
        y = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        y = y if weight_D is None else y * weight_D.double()
        return (y if bias_D is None else y + bias_D.double()).to(x_TD.dtype)

    def add_layer_norm(
        self,
        x_TD: torch.Tensor,
        residual_TD: torch.Tensor,
        weight_D: torch.Tensor | None,
        bias_D: torch.Tensor | None,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (layer_norm(x + residual), x + residual)."""
        sum_TD = (x_TD.double() + residual_TD.double()).to(x_TD.dtype)
        return self.layer_norm(sum_TD, weight_D, bias_D, eps), sum_TD

    def rotary_embedding(
        self,
        q_THS: torch.Tensor,
        k_TKS: torch.Tensor,
        positions_T: torch.Tensor,
        cos_sin_PS: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return q and k, rotated by their positions (rotate-half layout)."""
        cos_sin_TS = cos_sin_PS[positions_T].double()
        return self._rotate(q_THS, cos_sin_TS), self._rotate(k_TKS, cos_sin_TS)

    def silu_and_mul(self, x_T2D: torch.Tensor) -> torch.Tensor:
        """Return silu(first half of the last dimension) · second half."""
        gate_TD, up_TD = x_T2D.double().chunk(2, dim=-1)
        return (gate_TD * gate_TD.sigmoid() * up_TD).to(x_T2D.dtype)

    def select_experts(
        self, x_TD: torch.Tensor, router: RouterWeights, routing: ExpertRouting
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the experts of each token and their weights, one token at a time."""
        logits_TE = x_TD.double() @ router.weight_ED.double().T
        if router.bias_E is not None:
            logits_TE = logits_TE + router.bias_E.double()
        chosen = [select(logits_E, router, routing) for logits_E in logits_TE.cpu()]
        shape = (len(chosen), routing.top_k)
        experts_TK = x_TD.new_empty(shape).long()
        weights_TK = x_TD.new_empty(shape).float()
        for token, (experts, weights_K) in enumerate(chosen):
            experts_TK[token] = experts_TK.new_tensor(experts)
            weights_TK[token] = weights_K
        return experts_TK, weights_TK

    def fused_experts(
        self,
        x_TD: torch.Tensor,
        experts_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        layer: ExpertWeights,
    ) -> torch.Tensor:
        """Return the weighted sum of the outputs of each token's experts."""
        return expert_sums(x_TD, experts_TK, weights_TK, layer).to(x_TD)

    def causal_conv(
        self,
        x_TC: torch.Tensor,
        weight_CW: torch.Tensor,
        bias_C: torch.Tensor | None,
        states_BWC: torch.Tensor,
        parts: StateParts,
    ) -> torch.Tensor:
        """Return the convolution of each channel, one token at a time."""
        return convolve(x_TC, weight_CW, bias_C, states_BWC, parts).to(x_TC)

    def plain_causal_conv(
        self,
        x_TC: torch.Tensor,
        weight_CW: torch.Tensor,
        bias_C: torch.Tensor | None,
        states_BWC: torch.Tensor,
        parts: StateParts,
    ) -> torch.Tensor:
        """Return the convolution of each channel without its activation, one token at a time."""
        return convolve(x_TC, weight_CW, bias_C, states_BWC, parts, activated=False).to(x_TC)

    def linear_attention(
        self, inputs: LinearAttentionInputs, states_BHKV: torch.Tensor, parts: StateParts
    ) -> torch.Tensor:
        """Return the outputs of linear attention, one token at a time."""
        return recur(inputs, states_BHKV, parts).to(states_BHKV)

    def gated_recurrence(
        self, inputs: GatedRecurrenceInputs, states_BC: torch.Tensor, parts: StateParts
    ) -> torch.Tensor:
        """Return the states after each token, one token at a time."""
        return recur_gated(inputs, states_BC, parts).to(inputs.x_TC)

    def gated_rms_norm(
        self,
        x_TGI: torch.Tensor,
        gate_TGI: torch.Tensor,
        weight_GI: torch.Tensor,
        eps: float,
        *,
        norm_first: bool,
    ) -> torch.Tensor:
        """Return the norm of each group, with its gate."""
        normed = normalize_gated(x_TGI, gate_TGI, weight_GI, eps, norm_first=norm_first)
        return normed.to(gate_TGI)

    def offset_rms_norm(
        self, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Return x / sqrt(mean(x²) + eps) · (1 + weight)."""
        return exact_offset_norm(x_TD.double().cpu(), weight_D, eps).to(x_TD)

    def add_offset_rms_norm(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (offset_rms_norm(x + residual), x + residual)."""
        sum_TD = (x_TD.double() + residual_TD.double()).to(x_TD.dtype)
        return self.offset_rms_norm(sum_TD, weight_D, eps), sum_TD

    def sigmoid_and_mul(self, x_TD: torch.Tensor, gate_TD: torch.Tensor) -> torch.Tensor:
        """Return x · sigmoid(gate)."""
        return (x_TD.double() * gate_TD.double().sigmoid()).to(x_TD.dtype)

    def gelu_tanh_and_mul(self, x_TD: torch.Tensor, gate_TD: torch.Tensor) -> torch.Tensor:
        """Return x · gelu(gate), with the tanh approximation."""
        return (x_TD.double() * exact_gelu_tanh(gate_TD.double())).to(x_TD.dtype)

    def scale(self, x_TD: torch.Tensor, factor: float) -> torch.Tensor:
        """Return x · factor."""
        return (x_TD.double() * factor).to(x_TD.dtype)

    def soft_cap(self, logits_RV: torch.Tensor, cap: float) -> torch.Tensor:
        """Return cap · tanh(logits / cap)."""
        return (cap * (logits_RV.double() / cap).tanh()).to(logits_RV.dtype)

    def add_shared_expert(
        self,
        y_TD: torch.Tensor,
        shared_TD: torch.Tensor,
        x_TD: torch.Tensor,
        gate_D: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return y + shared, or with a gate y + sigmoid(x · gate) · shared."""
        shared = shared_TD.double()
        if gate_D is not None:
            shared = shared * (x_TD.double() @ gate_D.double()).sigmoid()[:, None]
        return (y_TD.double() + shared).to(y_TD.dtype)

    def head_linear(self, x_THI: torch.Tensor, weight_HOI: torch.Tensor) -> torch.Tensor:
        """Return x · Wᵀ of each head."""
        y_THO = (x_THI.double()[:, :, None] * weight_HOI.double()).sum(-1)
        return y_THO.to(x_THI.dtype)

    def latent_inputs(
        self,
        q_THF: torch.Tensor,
        latent_TF: torch.Tensor,
        weights: LatentWeights,
        positions_T: torch.Tensor,
        cos_sin_PR: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries and keys of latent attention."""
        _, plain, rank = weights.key_HNL.shape
        q_THR, k_T1R = self.rotary_embedding(
            q_THF[..., plain:], latent_TF[:, None, rank:], positions_T, cos_sin_PR
        )
        latent_TL = self.rms_norm(latent_TF[:, :rank], weights.norm_L, weights.eps)
        q_THL = self.head_linear(q_THF[..., :plain], weights.key_HNL.mT)
        queries = q_THF.new_empty((*q_THL.shape[:2], rank + q_THR.shape[-1]))
        keys = queries[:, :1].clone()
        queries[..., :rank], queries[..., rank:] = q_THL, q_THR
        keys[..., :rank], keys[..., rank:] = latent_TL[:, None], k_T1R
        return queries, keys

    def embedding(self, ids_T: torch.Tensor, table_VD: torch.Tensor) -> torch.Tensor:
        """Return the row of the table for each id."""
        return table_VD.index_select(0, ids_T)

    def best_tokens(self, logits_RV: torch.Tensor) -> torch.Tensor:
        """Return the column of each row's largest value, the first if several are equal."""
        return logits_RV.argmax(-1)

    def mask_tokens(
        self, logits_SV: torch.Tensor, rows_G: torch.Tensor, bits_GB: torch.Tensor
    ) -> None:
        """Set the logits of forbidden tokens to -inf, in place."""
        for row, bits in zip(rows_G.tolist(), bits_GB.tolist(), strict=True):
            for token in range(logits_SV.shape[1]):
                if not bits[token // 8] >> token % 8 & 1:
                    logits_SV[row, token] = float("-inf")

    def draw_tokens(self, logits_RV: torch.Tensor, columns: DrawColumns) -> torch.Tensor:
        """Return one token per row, by inversion of the cumulative probabilities."""
        token_ids_R = columns.seeds_R.clone()
        for r, logits in enumerate(logits_RV.tolist()):
            settings = DrawParams(
                temperature=columns.temperature_R[r].item(),
                top_k=int(columns.top_k_R[r]),
                top_p=_as_written(columns.top_p_R[r].item()),
                min_p=_as_written(columns.min_p_R[r].item()),
            )
            seed, position = int(columns.seeds_R[r]), int(columns.positions_R[r])
            token_ids_R[r] = _draw(logits, settings, Random(f"{seed} at {position}").random())
        return token_ids_R

    def prepare_inputs(self, columns: StepColumns) -> None:
        """Write the output columns of `columns`, one token at a time."""
        firsts = columns.query_start_R1.tolist()
        for r, (row, start) in enumerate(
            zip(columns.rows_R.tolist(), columns.starts_R.tolist(), strict=True)
        ):
            columns.seq_lens_R[r] = start + firsts[r + 1] - firsts[r]
            for table, created in zip(columns.block_tables, columns.block_tables_RM, strict=True):
                created[r] = table[row, : created.shape[1]]
            for index in range(firsts[r], firsts[r + 1]):
                position = start + index - firsts[r]
                columns.input_ids_T[index] = columns.token_ids_RL[row, position]
                columns.positions_T[index] = position
                self._write_slots(columns, row, position, index)

    def _write_slots(self, columns: StepColumns, row: int, position: int, index: int) -> None:
        groups = zip(columns.block_tables, columns.block_sizes, columns.slots_T, strict=True)
        for table, size, slots in groups:
            slots[index] = int(table[row, position // size]) * size + position % size

    def _rotate(self, x_TNS: torch.Tensor, cos_sin_TS: torch.Tensor) -> torch.Tensor:
        half = cos_sin_TS.shape[-1] // 2
        turned_TNS = x_TNS.double().clone()
        for i in range(half):
            cos_T1, sin_T1 = cos_sin_TS[:, None, i], cos_sin_TS[:, None, half + i]
            left_TN, right_TN = x_TNS[..., i].double(), x_TNS[..., half + i].double()
            turned_TNS[..., i] = left_TN * cos_T1 - right_TN * sin_T1
            turned_TNS[..., half + i] = right_TN * cos_T1 + left_TN * sin_T1
        return turned_TNS.to(x_TNS.dtype)


def _draw(logits: list[float], settings: DrawParams, uniform: float) -> int:
    """Return the first token whose cumulative probability reaches `uniform` (0 to 1).

    Returns 0 if no token can be sampled.
    """
    if any(map(math.isnan, logits)) or max(logits) == -math.inf:
        return 0
    sums = list(accumulate(probabilities(logits, settings)))
    return next((token for token, total in enumerate(sums) if total > uniform * sums[-1]), 0)


def _as_written(share: float) -> float:
    """Return the shortest decimal for a float32 number, such as 0.7 for float32(0.7)."""
    return float(f"{share:.6g}")
