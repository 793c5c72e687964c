"""The arguments of the operations of an op provider, and the sets of operations of model parts.

Dimensions: T tokens, D features of the last dimension, H heads; of logits: R rows, V vocabulary; of
experts: E experts, G gate and up features, I = G / 2; of states: N parts, C channels, G groups of
heads, K and V features of a key and of a value; of latent attention: L latent features, N features
of a key without position.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


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

    A run is the tokens of one request in this step. Inputs, one entry per run: rows_R, starts_R:
    int32; the row, and the position of the run's first token. query_start_R1: int32 [R + 1]; index
    of each run's first token among the T.
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
    softmax of the selected logits. scale: the multiplier of the weights. num_groups, top_groups:
    experts are selected from the `top_groups` best of `num_groups` equal groups; 1 and 1 for no
    groups. A group counts as much as its best expert, or with a correction as the sum of its two
    best experts.
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

    weight_ED, bias_E: the linear layer that computes the logits. correction_E: float32; added to
    the scores for the selection only, not to the weights of the selected experts.
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
    """A step's tokens, split at the positions whose states are saved.

    A part has consecutive tokens of one request. The parts contain all tokens of the step, in
    order, and the parts of a request follow each other. The state before a part is that of block
    `reads_N`, or zeros if the entry is -1. For all parts of a request except the first, it is the
    state after the previous part. The state after a part is written to block `writes_N`.
    sizes: number of tokens of each part, at least 1. num_parts: number of parts of each request, at
    least 1. Both are known on the host.
    reads_N, writes_N: int64, on the device. No request writes to a block that another one reads or
    writes.
    memory: the same values at addresses that stay the same, or None.
    """

    sizes: tuple[int, ...]
    num_parts: tuple[int, ...]
    reads_N: torch.Tensor
    writes_N: torch.Tensor
    memory: StatePartsMemory | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StatePartsMemory:
    """The parts of a step in host memory, at the same addresses in every step.

    A provider whose operations are recorded and replayed reads the parts from this memory. The
    tensors are int64; num_requests_1 has the number of requests R, and the values of the step are
    the first R of num_parts_R, and the first N of the others.
    """

    num_requests_1: torch.Tensor
    num_parts_R: torch.Tensor
    sizes_N: torch.Tensor
    reads_N: torch.Tensor
    writes_N: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttentionInputs:
    """The inputs of `Ops.linear_attention`. Each group is used by H / G consecutive heads.

    q_TGK, k_TGK, v_THV: queries, keys and values. steps_TH: logits of the step sizes.
    step_bias_H: float32; added to these logits. step_limits: minimum and maximum of a step size.
    rates_H: float32, at most 0; the logarithm of the state's decay factor for a step size of 1.
    beta_TH: logits of the delta rule; None without the rule.
    skip_H: float32; multiplier of a token's own value, which is added to its output; None for 0.
    key_eps: if above 0, queries and keys are divided by sqrt(sum of their squares + key_eps), and
    queries also by sqrt(K). If 0, they are not changed.
    """

    q_TGK: torch.Tensor
    k_TGK: torch.Tensor
    v_THV: torch.Tensor
    steps_TH: torch.Tensor
    step_bias_H: torch.Tensor
    rates_H: torch.Tensor
    step_limits: tuple[float, float] = (0.0, math.inf)
    beta_TH: torch.Tensor | None = None
    skip_H: torch.Tensor | None = None
    key_eps: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedRecurrenceInputs:
    """The inputs of `Ops.gated_recurrence`.

    x_TC: values. input_gates_TC, decay_gates_TC: logits of the gates of a value and of the decay.
    input_bias_C, decay_bias_C: float32; added to these logits. rates_C: float32, at most 0; the
    logarithm of the state's decay factor if the gate is 1.
    """

    x_TC: torch.Tensor
    input_gates_TC: torch.Tensor
    decay_gates_TC: torch.Tensor
    input_bias_C: torch.Tensor
    decay_bias_C: torch.Tensor
    rates_C: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentWeights:
    """The weights of `Ops.latent_inputs`.

    norm_L, eps: the weight and epsilon of the RMS norm of latent vectors. key_HNL: the projection
    of latent vectors to the keys of each head.
    """

    norm_L: torch.Tensor
    eps: float
    key_HNL: torch.Tensor


ROUNDED = frozenset(
    {"rms_norm", "add_rms_norm", "rotary_embedding", "silu_and_mul", "select_experts"}
)
"""Operations with rounded results. In torch, they may not be batch-invariant."""

STATE_OPERATIONS = frozenset({"causal_conv", "linear_attention", "gated_rms_norm"})
"""Operations of recurrent models. In torch, they may not be batch-invariant."""
RECURRENCE_OPERATIONS = frozenset(
    {"plain_causal_conv", "gated_recurrence", "head_linear", "gelu_tanh_and_mul"}
)
"""Operations of layers with gated recurrences. In torch, they may not be batch-invariant."""
LATENT_OPERATIONS = frozenset({"latent_inputs", "head_linear"})
"""Operations of latent attention. In torch, they may not be batch-invariant."""
MIXED_OPERATIONS = frozenset(
    {"offset_rms_norm", "add_offset_rms_norm", "sigmoid_and_mul", "add_shared_expert"}
)
"""Other operations of recurrent models or of latent attention, not batch-invariant in torch."""
