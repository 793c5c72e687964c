"""The operation `gated_recurrence` (RG-LRU) with torch: the reference for fused providers.

It does not wait for an asynchronous device: the boundaries of parts are known on the host, and the
blocks only on the device.
Dimensions: T tokens, R requests, N parts, B blocks, C channels, L tokens of a chunk, M chunks.
"""

from __future__ import annotations

import numpy as np
import torch

from dovetail.interfaces.ops import GatedRecurrenceInputs, StateParts
from dovetail_torch.layers.state_ops import CHUNK_SIZE, on_device, read_states, request_sizes


def gated_recurrence(
    inputs: GatedRecurrenceInputs, states_BC: torch.Tensor, parts: StateParts
) -> torch.Tensor:
    """Return the states after each token, a new tensor [T, C], and update the states.

    Requests are computed separately, so that a NaN of one request does not reach another one.
    """
    gates_TC = (inputs.decay_gates_TC.float() + inputs.decay_bias_C).sigmoid_()
    exponents_TC = gates_TC.mul_(inputs.rates_C)
    scale_TC = torch.expm1(2 * exponents_TC).neg_().sqrt_()
    decay_TC = exponents_TC.exp_()
    firsts, counts = request_sizes(parts)
    starts = np.cumsum(counts) - counts
    starts_R = on_device(starts, states_BC)
    is_new_R = parts.reads_N.index_select(0, on_device(firsts[:-1], states_BC)) < 0
    first_scale_RC = scale_TC.index_select(0, starts_R).masked_fill_(is_new_R[:, None], 1)
    scale_TC.index_copy_(0, starts_R, first_scale_RC)
    gates_TC = (inputs.input_gates_TC.float() + inputs.input_bias_C).sigmoid_()
    state_TC = gates_TC.mul_(inputs.x_TC).mul_(scale_TC)
    before_RC = read_states(states_BC, parts.reads_N, firsts[:-1].tolist())
    first_RC = state_TC.index_select(0, starts_R)
    first_RC.addcmul_(decay_TC.index_select(0, starts_R), before_RC)
    state_TC.index_copy_(0, starts_R, first_RC)
    for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
        _scan(decay_TC[start : start + count], state_TC[start : start + count])
    last_N = on_device(np.cumsum(parts.sizes) - 1, states_BC)
    states_BC.index_copy_(0, parts.writes_N, state_TC.index_select(0, last_N))
    return state_TC.to(inputs.x_TC.dtype)


def _scan(decay_TC: torch.Tensor, state_TC: torch.Tensor) -> None:
    """Add the decayed state after the previous token to the value of each token, in place.

    The tokens are those of one request. `decay_TC` is overwritten. All chunks are computed at the
    same time, then each chunk adds the state after the previous chunk.
    """
    num_tokens = len(state_TC)
    num_chunks = num_tokens // CHUNK_SIZE if num_tokens >= 2 * CHUNK_SIZE else 0
    whole = num_chunks * CHUNK_SIZE
    if num_chunks:
        decay_MLC, state_MLC = (
            x_TC[:whole].unflatten(0, (num_chunks, CHUNK_SIZE)) for x_TC in (decay_TC, state_TC)
        )
        decays, states = decay_MLC.unbind(1), state_MLC.unbind(1)
        for index in range(1, CHUNK_SIZE):
            states[index].addcmul_(decays[index], states[index - 1])
            decays[index].mul_(decays[index - 1])
        for chunk in range(1, num_chunks):
            state_MLC[chunk].addcmul_(decay_MLC[chunk], state_MLC[chunk - 1, -1])
    for token in range(max(whole, 1), num_tokens):
        state_TC[token].addcmul_(decay_TC[token], state_TC[token - 1])
