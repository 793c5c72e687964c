"""The contract of an op provider: small fused operations between the matrix multiplications.

Every operation is optional. A provider overrides some of them, and the torch layer computes the
others. New operations have a torch implementation, so existing providers stay valid.
An operation returns new tensors or reuses the memory of its inputs, as its docstring says. It
keeps no reference to them.
Dimensions: T tokens, D features of the last dimension, H heads, S head size; of logits: R rows,
V vocabulary; of experts: E experts, K experts of a token, G gate and up features, I = G / 2; of
states: N parts, B blocks, C channels, W kernel size, G groups of heads, K and V features of a key
and of a value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

if TYPE_CHECKING:
    import torch

_Method = TypeVar("_Method", bound=Callable[..., Any])


def operation(method: _Method) -> _Method:
    """Mark a method of `Ops` as an operation that a provider may leave out."""
    method.is_optional = True  # type: ignore[attr-defined]
    return method


def overridden_operations(ops_cls: type) -> frozenset[str]:
    """Return the names of the operations that a provider implements itself."""
    return frozenset(
        name
        for name, method in vars(Ops).items()
        if getattr(method, "is_optional", False) and getattr(ops_cls, name, method) is not method
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawColumns:
    """Sampling parameters of each row of logits: device tensors of length R.

    temperature_R: float32; 0 for greedy sampling. top_k_R: int32; V or more to disable it.
    top_p_R, min_p_R: float32; 1 and 0 to disable them. seeds_R: int64, the bits of a uint64.
    positions_R: int64; number of the row's tokens so far.
    """

    temperature_R: torch.Tensor
    top_k_R: torch.Tensor
    top_p_R: torch.Tensor
    min_p_R: torch.Tensor
    seeds_R: torch.Tensor
    positions_R: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StepColumns:
    """Inputs and outputs of `Ops.prepare_inputs`. All tensors are on the device.

    Inputs, one entry per run: rows_R, starts_R: int32; the row, and the position of the run's first
    token. query_start_R1: int32 [R + 1]; index of each run's first token among the T.
    Inputs of all rows: token_ids_RL: int32 [rows, max_model_len]; block_tables: one int32 [rows, M]
    per KV-cache group; block_sizes: tokens per block of each group.
    Outputs: input_ids_T, positions_T: int64; seq_lens_R: int32, start plus tokens of the run.
    slots_T: one int64 [T] per group; block · size + offset. block_tables_RM: one int32 [R, M'] per
    group, M' ≤ M; the tables of the runs' rows.
    num_tokens: T. longest: tokens of the longest run.
    """

    rows_R: torch.Tensor
    starts_R: torch.Tensor
    query_start_R1: torch.Tensor
    token_ids_RL: torch.Tensor
    block_tables: tuple[torch.Tensor, ...]
    block_sizes: tuple[int, ...]
    input_ids_T: torch.Tensor
    positions_T: torch.Tensor
    seq_lens_R: torch.Tensor
    slots_T: tuple[torch.Tensor, ...]
    block_tables_RM: tuple[torch.Tensor, ...]
    num_tokens: int
    longest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRouting:
    """How a token's experts are selected from the logits of the router.

    top_k: number of experts of a token. scores: "softmax" or "sigmoid" of the logits. renormalize:
    whether the weights of a token's experts are divided by their sum. With softmax, that equals the
    softmax of the selected logits. scale: factor on the weights. num_groups, top_groups: experts
    are selected from the `top_groups` best of `num_groups` equal groups; 1 and 1 for no groups. A
    group counts as much as its best expert, or with a correction as the sum of its two best
    experts.
    Sources: Shazeer et al. 2017, arXiv:1701.06538; DeepSeek-AI 2024, arXiv:2412.19437.
    """

    top_k: int
    scores: str = "softmax"
    renormalize: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterWeights:
    """The weights of a router.

    weight_ED, bias_E: of the logits. correction_E: float32; added to the scores for the selection
    only, not to the weights of the selected experts.
    """

    weight_ED: torch.Tensor
    bias_E: torch.Tensor | None = None
    correction_E: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """The unpacked weights of a layer's experts: down(activation(gate(x), up(x))).

    gate_up_EGD: the rows of the gate projection, then those of the up projection. Biases may be
    None. limit: 0 for silu(gate) · up. Otherwise the activation of gpt-oss: gate is at most
    `limit`, up is within ±limit, and the result is gate · sigmoid(alpha · gate) · (up + 1).
    """

    gate_up_EGD: torch.Tensor
    down_EDI: torch.Tensor
    gate_up_bias_EG: torch.Tensor | None = None
    down_bias_ED: torch.Tensor | None = None
    limit: float = 0.0
    alpha: float = 1.702


@dataclass(frozen=True, slots=True, kw_only=True)
class StateParts:
    """The division of a step's tokens at the positions whose states are saved.

    A part has consecutive tokens of one request. The parts contain all tokens of the step, in
    order, and the parts of a request follow each other. The state before a part is that of block
    `reads_N`, or zeros if the entry is -1. For all parts of a request except the first, it is the
    state after the previous part. The state after a part is written to block `writes_N`.
    sizes: number of tokens of each part, at least 1. num_parts: number of parts of each request, at
    least 1. Both are known on the host.
    reads_N, writes_N: int64, on the device. No request writes to a block that another one reads or
    writes.
    """

    sizes: tuple[int, ...]
    num_parts: tuple[int, ...]
    reads_N: torch.Tensor
    writes_N: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttentionInputs:
    """The inputs of `Ops.linear_attention`.

    q_TGK, k_TGK: queries and keys; each group is used by H / G consecutive heads. v_THV: values.
    decay_TH: float32, at most 0; the logarithm of the factor on the state. beta_TH: float32, the
    step size of the delta rule; None without the rule.
    """

    q_TGK: torch.Tensor
    k_TGK: torch.Tensor
    v_THV: torch.Tensor
    decay_TH: torch.Tensor
    beta_TH: torch.Tensor | None = None


class Ops:
    """Norms, rotary embedding, activations, embedding look-up and sampling on one device type.

    Stateless; one instance serves a whole model. Inputs and outputs have the same dtype and device
    unless stated. Sums are accumulated in float32. An operation that is not overridden is never
    called; the torch layer calls its own implementation.
    """

    CONTRACT: ClassVar[str] = "ops"
    CONTRACT_VERSION: ClassVar[str] = "0.7"
    device_types: ClassVar[frozenset[str]] = frozenset()
    """Supported device types; empty for any."""
    batch_invariant: ClassVar[frozenset[str]] = frozenset()
    """Names of the dtypes for which the result of a row is bitwise independent of other rows.

    Only effective if the provider overrides all of `ROUNDED`: torch does not guarantee it.
    """

    def __init__(self) -> None:
        """Create the provider.

        A plugin with an options model takes the keyword `options=None`: a mapping, validated.
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

        None for weights of 1 and biases of 0. Source: Ba et al. 2016, arXiv:1607.06450.
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
    def rotary_embedding(
        self,
        q_THS: torch.Tensor,
        k_TKS: torch.Tensor,
        positions_T: torch.Tensor,
        cos_sin_PS: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return q and k, rotated by their positions in halves ("neox" style).

        positions_T: int64. cos_sin_PS: float32 [P positions, rotary size]; the first half of a row
        holds the cosines and the second half the sines of position · frequency. Features beyond the
        rotary size are copied. Source: Su et al. 2021, arXiv:2104.09864.
        """
        raise NotImplementedError

    @operation
    def silu_and_mul(self, x_T2D: torch.Tensor) -> torch.Tensor:
        """Return silu(first half of the last dimension) · second half."""
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

        experts_TK, weights_TK: as returned by `select_experts`. A token's experts are different. No
        token is dropped, and a token's result does not depend on the experts of other tokens. Do
        not wait for an asynchronous device.
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

        weight_CW: the last column is the factor on the token itself. states_BWC: [B, W - 1, C] in
        the dtype of x; the last W - 1 inputs, oldest first; updated in place. Blocks may be
        strided. Do not wait for the device.
        """
        raise NotImplementedError

    @operation
    def linear_attention(
        self, inputs: LinearAttentionInputs, states_BHKV: torch.Tensor, parts: StateParts
    ) -> torch.Tensor:
        """Return the outputs of linear attention with a decaying state, [T, H, V].

        For each token, with the state S [K, V] of a head: S ← exp(decay) · S. With the delta rule,
        v ← beta · (v - Sᵀk). Then S ← S + k·vᵀ, and the output is Sᵀq.
        states_BHKV: float32, updated in place. Blocks may be strided. Computed in float32; the
        outputs have the dtype of v. Do not wait for the device.
        Sources: Dao and Gu 2024, arXiv:2405.21060; Yang et al. 2024, arXiv:2412.06464.
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
        then keeps the smallest set with its share of the remaining probability, at least one token.
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


ROUNDED = frozenset(
    {"rms_norm", "add_rms_norm", "rotary_embedding", "silu_and_mul", "select_experts"}
)
"""Operations with rounded results. In torch, their bits may depend on the batch."""
