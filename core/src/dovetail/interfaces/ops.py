"""The contract of an op provider: small fused operations between the matrix multiplications.

Every operation is optional. A provider overrides some of them, and `dovetail_torch` computes the
others. New operations have a torch implementation, so existing providers stay valid.
An operation returns new tensors or reuses the memory of its inputs, as its docstring says. It
keeps no reference to them.
Dimensions: T tokens, D features of the last dimension, H heads, S head size; of logits: R rows,
V vocabulary; of experts: E experts, K experts of a token, G gate and up features, I = G / 2; of
states: N parts, B blocks, C channels, W kernel size, G groups of heads, K and V features of a key
and of a value; of latent attention: L latent features, N features of a key without position, R
rotary features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from dovetail.interfaces.op_arguments import (
    LATENT_OPERATIONS,
    MIXED_OPERATIONS,
    RECURRENCE_OPERATIONS,
    ROUNDED,
    STATE_OPERATIONS,
    DrawColumns,
    ExpertRouting,
    ExpertWeights,
    GatedRecurrenceInputs,
    LatentWeights,
    LinearAttentionInputs,
    RouterWeights,
    StateParts,
    StatePartsMemory,
    StepColumns,
)

if TYPE_CHECKING:
    import torch

__all__ = [
    "LATENT_OPERATIONS",
    "MIXED_OPERATIONS",
    "RECURRENCE_OPERATIONS",
    "ROUNDED",
    "STATE_OPERATIONS",
    "DrawColumns",
    "ExpertRouting",
    "ExpertWeights",
    "GatedRecurrenceInputs",
    "LatentWeights",
    "LinearAttentionInputs",
    "Ops",
    "RouterWeights",
    "StateParts",
    "StatePartsMemory",
    "StepColumns",
    "operation",
    "overridden_operations",
]

_Method = TypeVar("_Method", bound=Callable[..., Any])


def operation(method: _Method) -> _Method:
    """Mark a method of `Ops` as an operation that a provider may omit."""
    method.is_optional = True  # type: ignore[attr-defined]
    return method


def overridden_operations(ops_cls: type) -> frozenset[str]:
    """Return the names of the operations that a provider implements itself."""
    return frozenset(
        name
        for name, method in vars(Ops).items()
        if getattr(method, "is_optional", False) and getattr(ops_cls, name, method) is not method
    )


class Ops:
    """Norms, rotary embedding, activations, embedding look-up and sampling on one device type.

    Stateless; one instance serves a whole model. Inputs and outputs have the same dtype and device
    unless stated. Sums are accumulated in float32. An operation that is not overridden is never
    called; `dovetail_torch` calls its own implementation.
    """

    CONTRACT: ClassVar[str] = "ops"
    CONTRACT_VERSION: ClassVar[str] = "0.12"
    device_types: ClassVar[frozenset[str]] = frozenset()
    """Supported device types; empty for any."""
    dtypes: ClassVar[frozenset[str]] = frozenset()
    """Names of the supported dtypes of a model; empty for any."""
    batch_invariant: ClassVar[frozenset[str]] = frozenset()
    """Names of the dtypes for which the result of a row is bitwise independent of other rows.

    Only effective if the provider overrides all of `ROUNDED`: torch does not guarantee it.
    """
    batch_dependent: ClassVar[frozenset[str]] = frozenset()
    """Names of the operations that `batch_invariant` does not cover; none is in `ROUNDED`.

    For example, linear attention whose results depend on how a prompt is divided into steps.
    """

    def __init__(self) -> None:
        """Create the provider.

        If the plugin has an options model, this method must accept the keyword `options=None`: the
        validated options as a mapping.
        """

    @operation
    def rms_norm(self, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        """Return x / sqrt(mean(x²) + eps) · weight over the last dimension.

        Source: Zhang and Sennrich 2019, arXiv:1910.07467.
        """
        raise NotImplementedError

    @operation
    def add_rms_norm(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (rms_norm(x + residual), x + residual). `residual_TD` may be overwritten."""
        raise NotImplementedError

    @operation
    def layer_norm(
        self,
        x_TD: torch.Tensor,
        weight_D: torch.Tensor | None,
        bias_D: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        """Return (x - mean(x)) / sqrt(variance(x) + eps) · weight + bias over the last dimension.

        weight_D, bias_D: None for a weight of 1 and a bias of 0. Source: Ba et al. 2016,
        arXiv:1607.06450.
        """
        raise NotImplementedError

    @operation
    def add_layer_norm(
        self,
        x_TD: torch.Tensor,
        residual_TD: torch.Tensor,
        weight_D: torch.Tensor | None,
        bias_D: torch.Tensor | None,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (layer_norm(x + residual), x + residual). `residual_TD` may be overwritten."""
        raise NotImplementedError

    @operation
    def offset_rms_norm(
        self, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Return x / sqrt(mean(x²) + eps) · (1 + weight) over the last dimension.

        The product is computed in float32. Source: the reference code of Gemma, arXiv:2403.08295.
        """
        raise NotImplementedError

    @operation
    def add_offset_rms_norm(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (offset_rms_norm(x + residual), x + residual). May overwrite `residual_TD`."""
        raise NotImplementedError

    @operation
    def gated_rms_norm(
        self,
        x_TGI: torch.Tensor,
        gate_TGI: torch.Tensor,
        weight_GI: torch.Tensor,
        eps: float,
        *,
        norm_first: bool,
    ) -> torch.Tensor:
        """Return the norm of x · silu(gate), times weight, for each group of I features.

        With norm_first, return norm(x) · weight · silu(gate). The norm divides by
        sqrt(mean of squares + eps). x: float32; may be overwritten. weight: [I] or [G, I]. The
        result has the dtype of the gate.
        Sources: the reference code of Mamba 2 (Dao and Gu 2024), and of gated delta nets.
        """
        raise NotImplementedError

    @operation
    def rotary_embedding(
        self,
        q_THS: torch.Tensor,
        k_TKS: torch.Tensor,
        positions_T: torch.Tensor,
        cos_sin_PS: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return q and k, rotated by their positions in halves ("neox" style).

        positions_T: int64. cos_sin_PS: float32 [P positions, rotary_dim]; the first half of a row
        holds the cosines and the second half the sines of position · frequency. Features beyond the
        rotary_dim are copied. Source: Su et al. 2021, arXiv:2104.09864.
        """
        raise NotImplementedError

    @operation
    def silu_and_mul(self, x_T2D: torch.Tensor) -> torch.Tensor:
        """Return silu(first half of the last dimension) · second half."""
        raise NotImplementedError

    @operation
    def sigmoid_and_mul(self, x_TD: torch.Tensor, gate_TD: torch.Tensor) -> torch.Tensor:
        """Return x · sigmoid(gate). `x_TD` may be overwritten."""
        raise NotImplementedError

    @operation
    def gelu_tanh_and_mul(self, x_TD: torch.Tensor, gate_TD: torch.Tensor) -> torch.Tensor:
        """Return x · gelu(gate), by tanh (arXiv:1606.08415). `x_TD` may be overwritten."""
        raise NotImplementedError

    @operation
    def scale(self, x_TD: torch.Tensor, factor: float) -> torch.Tensor:
        """Return x · factor, where the factor has float32 precision. `x_TD` may be overwritten."""
        raise NotImplementedError

    @operation
    def soft_cap(self, logits_RV: torch.Tensor, cap: float) -> torch.Tensor:
        """Return cap · tanh(logits / cap) in any float dtype. `logits_RV` may be overwritten."""
        raise NotImplementedError

    @operation
    def latent_inputs(
        self,
        q_THF: torch.Tensor,
        latent_TF: torch.Tensor,
        weights: LatentWeights,
        positions_T: torch.Tensor,
        cos_sin_PR: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries [T, H, L + R] and keys [T, 1, L + R] of latent attention.

        The last R features of q and latent are rotated by their positions, as in
        `rotary_embedding`. The other features of q [T, H, N + R] are multiplied by the key weights
        of their head, and the other features of latent [T, L + R] are normalized (`rms_norm`).
        Source: DeepSeek-AI 2024, arXiv:2405.04434.
        """
        raise NotImplementedError

    @operation
    def head_linear(self, x_THI: torch.Tensor, weight_HOI: torch.Tensor) -> torch.Tensor:
        """Return x · Wᵀ of each head, contiguous [T, H, O]."""
        raise NotImplementedError

    @operation
    def select_experts(
        self, x_TD: torch.Tensor, router: RouterWeights, routing: ExpertRouting
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the experts of each token, int64 [T, K], best first, and their weights, float32.

        Logits are computed in float32. Do not wait for the device.
        """
        raise NotImplementedError

    @operation
    def fused_experts(
        self,
        x_TD: torch.Tensor,
        experts_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        layer: ExpertWeights,
    ) -> torch.Tensor:
        """Return the weighted sum of the outputs of each token's experts, [T, D].

        experts_TK, weights_TK: as returned by `select_experts`. A token's experts are distinct. No
        token is dropped, and a token's result does not depend on the experts of other tokens. Do
        not wait for an asynchronous device.
        """
        raise NotImplementedError

    @operation
    def add_shared_expert(
        self,
        y_TD: torch.Tensor,
        shared_TD: torch.Tensor,
        x_TD: torch.Tensor,
        gate_D: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return y + shared, or with a gate y + sigmoid(x · gate) · shared, [T, D].

        `y_TD` may be overwritten. Source: the reference code of Qwen2-MoE (gated shared experts).
        """
        raise NotImplementedError

    @operation
    def causal_conv(
        self,
        x_TC: torch.Tensor,
        weight_CW: torch.Tensor,
        bias_C: torch.Tensor | None,
        states_BWC: torch.Tensor,
        parts: StateParts,
    ) -> torch.Tensor:
        """Return silu(convolution of each channel with its last W inputs + bias), [T, C].

        weight_CW: the last column is multiplied by the current token's input.
        states_BWC: [B, W - 1, C] in the dtype of x; the last W - 1 inputs, oldest first; updated in
        place. Blocks may be strided. Do not wait for the device.
        """
        raise NotImplementedError

    @operation
    def plain_causal_conv(
        self,
        x_TC: torch.Tensor,
        weight_CW: torch.Tensor,
        bias_C: torch.Tensor | None,
        states_BWC: torch.Tensor,
        parts: StateParts,
    ) -> torch.Tensor:
        """Return the result of `causal_conv` without the SiLU, [T, C]."""
        raise NotImplementedError

    @operation
    def linear_attention(
        self, inputs: LinearAttentionInputs, states_BHKV: torch.Tensor, parts: StateParts
    ) -> torch.Tensor:
        """Return the outputs of linear attention with a decaying state, float32 [T, H, V].

        For each token, with the state S [K, V] of a head and step = softplus(logit + bias) within
        the limits: S ← exp(rate · step) · S. Without the delta rule, u = step · v; with the rule,
        u = sigmoid(beta) · (v - Sᵀk). Then S ← S + k·uᵀ, and the output is Sᵀq + skip · v.
        states_BHKV: float32, updated in place. Blocks may be strided. Computed in float32. Do not
        wait for the device.
        Sources: Dao and Gu 2024, arXiv:2405.21060; Yang et al. 2024, arXiv:2412.06464.
        """
        raise NotImplementedError

    @operation
    def gated_recurrence(
        self, inputs: GatedRecurrenceInputs, states_BC: torch.Tensor, parts: StateParts
    ) -> torch.Tensor:
        """Return the states after each token of a gated linear recurrence, a new tensor [T, C].

        For each token and channel, with a = exp(rate · sigmoid(decay logit + bias)):
        state ← a · state + sqrt(1 - a²) · sigmoid(input logit + bias) · x. The first token of a
        request that begins with zeros has the factor 1 instead of sqrt(1 - a²).
        states_BC: float32, updated in place. Blocks may be strided. Computed in float32. Do not
        wait for the device.
        Source: De et al. 2024, arXiv:2402.19427 (RG-LRU).
        """
        raise NotImplementedError

    @operation
    def embedding(self, ids_T: torch.Tensor, table_VD: torch.Tensor) -> torch.Tensor:
        """Return the rows of the table by id, a new tensor [T, D]. Ids are int64 and below V."""
        raise NotImplementedError

    @operation
    def best_tokens(self, logits_RV: torch.Tensor) -> torch.Tensor:
        """Return the column of each row's maximum, the first one if several are equal, int64 [R].

        Logits may have any float dtype. If all logits of a row are -inf, the result is 0. NaN
        counts as the maximum.
        """
        raise NotImplementedError

    @operation
    def mask_tokens(
        self, logits_SV: torch.Tensor, rows_G: torch.Tensor, bits_GB: torch.Tensor
    ) -> None:
        """Set the logits of forbidden tokens to -inf, in place.

        Row rows_G[i] (int64, each at most once) of the logits allows token t if bit t % 8 of byte
        t // 8 of bits_GB[i] (uint8) is 1. Logits may have any float dtype.
        """
        raise NotImplementedError

    @operation
    def draw_tokens(self, logits_RV: torch.Tensor, columns: DrawColumns) -> torch.Tensor:
        """Sample one token per row, int64 [R]: temperature, min-p, top-k, top-p, in that order.

        Used on asynchronous devices, so it must not wait for the device. Without it the sampler
        uses torch operations.
        Tokens are ordered by logit, equal logits by column. top-k keeps exactly k tokens. top-p
        then keeps the smallest set of tokens, at least one, whose share of the remaining
        probability is at least top_p.
        A row's token depends only on its own logits, parameters, seed and position, not on the rest
        of the batch or earlier steps. Logits: any float dtype; may be overwritten.
        Source of the method: Gumbel 1954; the maximum of logit + Gumbel noise.
        """
        raise NotImplementedError

    @operation
    def prepare_inputs(self, columns: StepColumns) -> None:
        """Write the outputs of `columns`. Its inputs are read only. Do not wait for the device.

        Used on asynchronous devices.
        """
        raise NotImplementedError
