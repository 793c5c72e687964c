"""The operations of layers with states: causal convolution and linear attention, with torch.

They are the reference for fused providers, and do not wait for an asynchronous device: the borders
of parts are known on the host, and the blocks only on the device.
Dimensions: T tokens, N parts, R requests, B blocks, C channels, W kernel size, H heads, G groups of
heads, K and V features of a key and of a value, L tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    kept = weight_CW.shape[1] - 1
    firsts, counts = _requests(parts)
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
    return functional.silu(total).to(x_TC.dtype)


def linear_attention(
    inputs: LinearAttentionInputs, states_BHKV: torch.Tensor, parts: StateParts
) -> torch.Tensor:
    """Return the outputs [T, H, V], a new tensor, and update the states.

    Requests with one token are computed together; longer parts in chunks, in sequence.
    """
    wide = _widen(inputs)
    firsts, _ = _requests(parts)
    ends = [0, *np.cumsum(parts.sizes).tolist()]
    out_THV = torch.empty_like(wide.v_THV)
    single = [
        first
        for first, last in pairwise(firsts.tolist())
        if last - first == 1 and parts.sizes[first] == 1
    ]
    if single:
        index = _on(np.asarray(single), wide.v_THV)
        tokens = _on(np.asarray([ends[part] for part in single]), wide.v_THV)
        state_NHKV = read_states(states_BHKV, parts.reads_N, single)
        step = _select(wide, tokens)
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
                out_THV[tokens_L] = _chunk(_cut(wide, tokens_L), state_HKV)
            states_BHKV.index_copy_(0, parts.writes_N[part : part + 1], state_HKV[None])
    return out_THV.to(inputs.v_THV.dtype)


def read_states(
    states: torch.Tensor, reads_N: torch.Tensor, indices: Sequence[int]
) -> torch.Tensor:
    """Return copies of the states before the parts `indices`; zeros for -1. [len(indices), …]."""
    own_N = reads_N
    if len(indices) != len(reads_N):
        own_N = reads_N.index_select(0, _on(np.asarray(indices), states))
    read = states.index_select(0, own_N.clamp(min=0))
    is_new = (own_N < 0).view(-1, *(1,) * (states.ndim - 1))
    return read.masked_fill_(is_new, 0)


def _requests(parts: StateParts) -> tuple[Array, Array]:
    """Return the first part of each request [R + 1], and the tokens of each request [R]."""
    firsts = np.concatenate((np.zeros(1, np.int64), np.cumsum(parts.num_parts)))
    ends = np.concatenate((np.zeros(1, np.int64), np.cumsum(parts.sizes)))
    return firsts, np.diff(ends[firsts])


def _on(index: Array, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(index).to(like.device)


def _widen(inputs: LinearAttentionInputs) -> LinearAttentionInputs:
    """Return the inputs in float32, with a query and a key for each head."""
    repeats = inputs.v_THV.shape[1] // inputs.q_TGK.shape[1]

    def keys(x_TGK: torch.Tensor) -> torch.Tensor:
        return x_TGK.float().repeat_interleave(repeats, dim=1) if repeats > 1 else x_TGK.float()

    return LinearAttentionInputs(
        q_TGK=keys(inputs.q_TGK),
        k_TGK=keys(inputs.k_TGK),
        v_THV=inputs.v_THV.float(),
        decay_TH=inputs.decay_TH,
        beta_TH=inputs.beta_TH,
    )


def _select(inputs: LinearAttentionInputs, tokens: torch.Tensor) -> LinearAttentionInputs:
    if len(tokens) == len(inputs.v_THV):  # the tokens are ascending, so these are all of them
        return inputs
    beta_TH = inputs.beta_TH
    return LinearAttentionInputs(
        q_TGK=inputs.q_TGK.index_select(0, tokens),
        k_TGK=inputs.k_TGK.index_select(0, tokens),
        v_THV=inputs.v_THV.index_select(0, tokens),
        decay_TH=inputs.decay_TH.index_select(0, tokens),
        beta_TH=None if beta_TH is None else beta_TH.index_select(0, tokens),
    )


def _cut(inputs: LinearAttentionInputs, tokens: slice) -> LinearAttentionInputs:
    return LinearAttentionInputs(
        q_TGK=inputs.q_TGK[tokens],
        k_TGK=inputs.k_TGK[tokens],
        v_THV=inputs.v_THV[tokens],
        decay_TH=inputs.decay_TH[tokens],
        beta_TH=None if inputs.beta_TH is None else inputs.beta_TH[tokens],
    )


def _step(inputs: LinearAttentionInputs, state_NHKV: torch.Tensor) -> torch.Tensor:
    """Return the outputs of one token of each request, [N, H, V], and update `state_NHKV`."""
    state_NHKV.mul_(inputs.decay_TH.exp()[..., None, None])
    u_NHV = inputs.v_THV
    if inputs.beta_TH is not None:
        known_NHV = (inputs.k_TGK[..., None, :] @ state_NHKV).squeeze(-2)
        u_NHV = inputs.beta_TH[..., None] * (u_NHV - known_NHV)
    state_NHKV.addcmul_(inputs.k_TGK[..., None], u_NHV[..., None, :])
    return (inputs.q_TGK[..., None, :] @ state_NHKV).squeeze(-2)


def _chunk(inputs: LinearAttentionInputs, state_HKV: torch.Tensor) -> torch.Tensor:
    """Return the outputs of consecutive tokens of a request, [L, H, V], and update `state_HKV`.

    With the sum c of the logarithms of decays up to each token, the state after token i is
    exp(c_i)·S + Σ_j exp(c_i - c_j)·k_j·u_jᵀ over j ≤ i, and u is v, or with the delta rule the
    solution of a triangular system. Exponents are never positive, because i ≥ j.
    """
    q_HLK, k_HLK, v_HLV = (x.transpose(0, 1) for x in (inputs.q_TGK, inputs.k_TGK, inputs.v_THV))
    sum_HL = inputs.decay_TH.T.cumsum(-1)
    length = sum_HL.shape[-1]
    upper = torch.ones(length, length, dtype=torch.bool, device=sum_HL.device).triu_(1)
    between_HLL = (sum_HL[..., None] - sum_HL[:, None]).masked_fill_(upper, -torch.inf).exp_()
    since_HL1 = sum_HL.exp()[..., None]
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
