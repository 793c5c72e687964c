"""The operations of recurrent layers: convolution, linear attention, and gated norms, with torch.

They are the reference for fused providers, and do not wait for an asynchronous device: the
boundaries of parts are known on the host, and the blocks only on the device.
Dimensions: T tokens, N parts, R requests, B blocks, C channels, W kernel size, H heads, G groups of
heads, K and V features of a key and of a value, L tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch.nn import functional

from dovetail.interfaces.ops import LinearAttentionInputs, StateParts
from dovetail_torch.runner.device_columns import Array

CHUNK_SIZE = 64
"""Tokens of a part that are computed at once."""


def causal_conv(
    x_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    states_BWC: torch.Tensor,
    parts: StateParts,
) -> torch.Tensor:
    """Return silu(convolution + bias), a new tensor [T, C], and update the states."""
    total_TC = plain_causal_conv(x_TC, weight_CW, bias_C, states_BWC, parts)
    return functional.silu(total_TC).to(x_TC.dtype)


def plain_causal_conv(
    x_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    states_BWC: torch.Tensor,
    parts: StateParts,
) -> torch.Tensor:
    """Return convolution + bias, a new float32 tensor [T, C], and update the states."""
    kept = weight_CW.shape[1] - 1
    firsts, counts = request_sizes(parts)
    before = read_states(states_BWC, parts.reads_N, firsts[:-1].tolist())
    rows = torch.cat((x_TC, before.flatten(0, 1)))
    starts = np.cumsum(counts) - counts
    token_T = np.arange(len(x_TC))
    run_T = np.repeat(np.arange(len(counts)), counts)

    def inputs_before(token: Array, lag: int | Array) -> torch.Tensor:
        """Return the inputs `lag` tokens before these tokens, [number of tokens, C]."""
        run, index = run_T[token], token - lag
        in_state = len(x_TC) + run * kept + kept + index - starts[run]
        index = np.where(index >= starts[run], index, in_state)
        return rows.index_select(0, torch.from_numpy(index).to(rows.device))

    total = torch.zeros(x_TC.shape, dtype=torch.float32, device=x_TC.device)
    for lag in range(kept + 1):
        total.addcmul_(inputs_before(token_T, lag).float(), weight_CW[:, kept - lag])
    if bias_C is not None:
        total += bias_C
    last_N = np.cumsum(parts.sizes) - 1
    lags = np.arange(kept - 1, -1, -1)
    saved = inputs_before(last_N.repeat(kept), np.tile(lags, len(last_N)))
    states_BWC.index_copy_(0, parts.writes_N, saved.unflatten(0, (-1, kept)))
    return total


def linear_attention(
    inputs: LinearAttentionInputs, states_BHKV: torch.Tensor, parts: StateParts
) -> torch.Tensor:
    """Return the outputs [T, H, V], a new tensor, and update the states.

    Requests with one token are computed together; longer parts in chunks, in sequence.
    """
    wide = _recurrence(inputs)
    firsts, _ = request_sizes(parts)
    ends = [0, *np.cumsum(parts.sizes).tolist()]
    out_THV = torch.empty_like(wide.u_THV)
    single = [
        first
        for first, last in pairwise(firsts.tolist())
        if last - first == 1 and parts.sizes[first] == 1
    ]
    if single:
        index = on_device(np.asarray(single), out_THV)
        tokens = on_device(np.asarray([ends[part] for part in single]), out_THV)
        state_NHKV = read_states(states_BHKV, parts.reads_N, single)
        # The indices are ascending and unique: if none is missing, a copy is not needed.
        step = wide if len(tokens) == len(out_THV) else wide.at(tokens)
        out_THV.index_copy_(0, tokens, _step(step, state_NHKV))
        states_BHKV.index_copy_(0, parts.writes_N.index_select(0, index), state_NHKV)
    alone = set(single)
    for first, last in pairwise(firsts.tolist()):
        if first in alone:
            continue
        state_HKV = read_states(states_BHKV, parts.reads_N, [first])[0]
        for part in range(first, last):
            for start in range(ends[part], ends[part + 1], CHUNK_SIZE):
                tokens_L = slice(start, min(start + CHUNK_SIZE, ends[part + 1]))
                out_THV[tokens_L] = _chunk(wide.at(tokens_L), state_HKV)
            states_BHKV.index_copy_(0, parts.writes_N[part : part + 1], state_HKV[None])
    if inputs.skip_H is not None:
        out_THV.addcmul_(inputs.v_THV.float(), inputs.skip_H[:, None])
    return out_THV


def gated_rms_norm(
    x_TGI: torch.Tensor,
    gate_TGI: torch.Tensor,
    weight_GI: torch.Tensor,
    eps: float,
    *,
    norm_first: bool,
) -> torch.Tensor:
    """Return the gated RMS norm of x, a new tensor [T, G, I]."""
    gate = functional.silu(gate_TGI.float())
    if not norm_first:
        x_TGI = x_TGI * gate
    scale_TG1 = torch.rsqrt(x_TGI.square().mean(-1, keepdim=True) + eps)
    y_TGI = x_TGI * scale_TG1 * weight_GI
    return (y_TGI * gate if norm_first else y_TGI).to(gate_TGI.dtype)


def read_states(
    states: torch.Tensor, reads_N: torch.Tensor, indices: Sequence[int]
) -> torch.Tensor:
    """Return copies of the states before the parts `indices`; zeros for -1. [len(indices), …]."""
    own_N = reads_N
    if len(indices) != len(reads_N):
        own_N = reads_N.index_select(0, on_device(np.asarray(indices), states))
    read = states.index_select(0, own_N.clamp(min=0))
    is_new = (own_N < 0).view(-1, *(1,) * (states.ndim - 1))
    return read.masked_fill_(is_new, 0)


def request_sizes(parts: StateParts) -> tuple[Array, Array]:
    """Return the first part of each request [R + 1], and the tokens of each request [R]."""
    firsts = np.concatenate((np.zeros(1, np.int64), np.cumsum(parts.num_parts)))
    ends = np.concatenate((np.zeros(1, np.int64), np.cumsum(parts.sizes)))
    return firsts, np.diff(ends[firsts])


def on_device(index: Array, like: torch.Tensor) -> torch.Tensor:
    """Return the indices, int64, on the device of `like`."""
    return torch.from_numpy(index).to(like.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recurrence:
    """The inputs in float32, with a query and a key for each head.

    u_THV: what is added to the state, before the delta rule. decay_TH: the logarithm of the decay,
    which multiplies the state.
    """

    q_THK: torch.Tensor
    k_THK: torch.Tensor
    u_THV: torch.Tensor
    decay_TH: torch.Tensor
    beta_TH: torch.Tensor | None

    def at(self, tokens: slice | torch.Tensor) -> _Recurrence:
        """Return the inputs of these tokens."""
        return _Recurrence(
            q_THK=self.q_THK[tokens],
            k_THK=self.k_THK[tokens],
            u_THV=self.u_THV[tokens],
            decay_TH=self.decay_TH[tokens],
            beta_TH=None if self.beta_TH is None else self.beta_TH[tokens],
        )


def _recurrence(inputs: LinearAttentionInputs) -> _Recurrence:
    repeats = inputs.v_THV.shape[1] // inputs.q_TGK.shape[1]

    def keys(x_TGK: torch.Tensor, length: float) -> torch.Tensor:
        x_TGK = x_TGK.float()
        if inputs.key_eps:
            squares = x_TGK.square().sum(-1, keepdim=True)
            x_TGK = x_TGK * (torch.rsqrt(squares + inputs.key_eps) * length)
        return x_TGK.repeat_interleave(repeats, dim=1) if repeats > 1 else x_TGK

    step_TH = functional.softplus(inputs.steps_TH.float() + inputs.step_bias_H)
    step_TH = step_TH.clamp(*inputs.step_limits)
    has_rule = inputs.beta_TH is not None
    v_THV = inputs.v_THV.float()
    return _Recurrence(
        q_THK=keys(inputs.q_TGK, inputs.q_TGK.shape[-1] ** -0.5),
        k_THK=keys(inputs.k_TGK, 1.0),
        u_THV=v_THV if has_rule else v_THV * step_TH[..., None],
        decay_TH=inputs.rates_H * step_TH,
        beta_TH=None if inputs.beta_TH is None else inputs.beta_TH.float().sigmoid(),
    )


def _step(inputs: _Recurrence, state_NHKV: torch.Tensor) -> torch.Tensor:
    """Return the outputs of one token of each request, [N, H, V], and update `state_NHKV`."""
    state_NHKV.mul_(inputs.decay_TH.exp()[..., None, None])
    u_NHV = inputs.u_THV
    if inputs.beta_TH is not None:
        known_NHV = (inputs.k_THK[..., None, :] @ state_NHKV).squeeze(-2)
        u_NHV = inputs.beta_TH[..., None] * (u_NHV - known_NHV)
    state_NHKV.addcmul_(inputs.k_THK[..., None], u_NHV[..., None, :])
    return (inputs.q_THK[..., None, :] @ state_NHKV).squeeze(-2)


def _chunk(inputs: _Recurrence, state_HKV: torch.Tensor) -> torch.Tensor:
    """Return the outputs of consecutive tokens of a request, [L, H, V], and update `state_HKV`.

    With the sum c of the logarithms of decays up to each token, the state after token i is
    exp(c_i)·S + Σ_j exp(c_i - c_j)·k_j·u_jᵀ over j ≤ i, and u is v, or with the delta rule the
    solution of a triangular system. Exponents are never positive, because i ≥ j. The sums are in
    float64: after strong decays, the difference of two large sums may be small.
    """
    q_HLK, k_HLK, v_HLV = (x.transpose(0, 1) for x in (inputs.q_THK, inputs.k_THK, inputs.u_THV))
    sum_HL = inputs.decay_TH.T.cumsum(-1, dtype=torch.float64)
    length = sum_HL.shape[-1]
    upper = torch.ones(length, length, dtype=torch.bool, device=sum_HL.device).triu_(1)
    between_HLL = (sum_HL[..., None] - sum_HL[:, None]).float()
    between_HLL = between_HLL.masked_fill_(upper, -torch.inf).exp_()
    since_HL1 = sum_HL.float().exp()[..., None]
    u_HLV = v_HLV
    if inputs.beta_TH is not None:
        beta_HL1 = inputs.beta_TH.T[..., None]
        system_HLL = ((k_HLK @ k_HLK.mT) * between_HLL * beta_HL1).tril_(-1)
        right_HLV = beta_HL1 * (v_HLV - since_HL1 * (k_HLK @ state_HKV))
        u_HLV = torch.linalg.solve_triangular(
            system_HLL, right_HLV, upper=False, unitriangular=True
        )
    scores_HLL = (q_HLK @ k_HLK.mT) * between_HLL
    out_HLV = since_HL1 * (q_HLK @ state_HKV) + scores_HLL @ u_HLV
    until_HL1 = between_HLL[:, -1, :, None]
    state_HKV.mul_(since_HL1[:, -1:]).add_((k_HLK * until_HL1).mT @ u_HLV)
    return out_HLV.transpose(0, 1)
