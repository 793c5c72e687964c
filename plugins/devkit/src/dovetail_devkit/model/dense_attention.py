"""Dense attention and recurrent states, to compare a model with itself. Imports torch.

Dimensions: T tokens, H query heads, K key-value heads, D head size, Q queries, L positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from dovetail.interfaces.attention import RotaryArgs
from dovetail.interfaces.model import LayerState, StateTensor
from dovetail.interfaces.ops import StateParts
from dovetail_devkit.attention.reference import reference_attention
from dovetail_devkit.expectation import expect

MAX_SEQUENCES = 64
"""Maximum number of sequences for a model with recurrent states."""


class DenseAttention:
    """Dense attention and recurrent states of each layer. Implements `AttentionContext`.

    calls: layer indices in the order of the model's calls. needed: indices (int64) of the tokens
    that are needed after attention of the last layer; None for all. bidirectional: whether a token
    also attends to the later tokens of its sequence, which is then computed in one step.
    """

    def __init__(self, *, bidirectional: bool = False) -> None:
        self.bidirectional = bidirectional
        self.calls: list[int] = []
        self.needed: torch.Tensor | None = None
        self._runs: list[tuple[int, int]] = []
        self._kept: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._states: dict[int, tuple[torch.Tensor, ...]] = {}
        self._begun: set[tuple[int, int]] = set()

    def begin(self, runs: Sequence[tuple[int, int]]) -> None:
        """Set the sequences of the next forward pass, and the number of tokens of each."""
        self._runs = list(runs)
        self.calls = []

    def attend(
        self,
        index: int,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        rotary_args: RotaryArgs | None = None,
    ) -> torch.Tensor:
        """Return the attention of layer `index`, [T, H, D]."""
        self.calls.append(index)
        if rotary_args is not None:
            q_THD, k_TKD = rotary_args.apply(q_THD, k_TKD)
        total = sum(count for _, count in self._runs)
        lengths = {len(x) for x in (q_THD, k_TKD, v_TKD)}
        expect(
            lengths == {total},
            f"layer {index} passes {lengths} tokens to attention; expected {total}",
        )
        expect(
            k_TKD.shape == v_TKD.shape or torch.equal(k_TKD[..., : v_TKD.shape[-1]], v_TKD),
            f"layer {index}: keys and values must have the same shape, or the values must be the "
            "first features of the keys",
        )
        expect(
            q_THD.shape[1] % k_TKD.shape[1] == 0,
            f"layer {index}: the number of query heads must be a multiple of the key-value heads",
        )
        pieces, end = [], 0
        for sequence, count in self._runs:
            start, end = end, end + count
            pieces.append(
                self._attend(index, sequence, q_THD[start:end], k_TKD[start:end], v_TKD[start:end])
            )
        return torch.cat(pieces).to(q_THD.dtype)

    def state(self, index: int, tensors: Sequence[StateTensor]) -> LayerState:
        """Return the states of layer `index`. The state of sequence s is in block s."""
        self.calls.append(index)
        sequences = [sequence for sequence, _ in self._runs]
        if index not in self._states:
            # NaN shows whether a layer reads a state that does not exist yet.
            self._states[index] = tuple(
                torch.full(
                    (MAX_SEQUENCES, *tensor.shape),
                    torch.nan,
                    dtype=tensor.dtype,
                    device=tensor.device,
                )
                for tensor in tensors
            )
        reads = [s if (index, s) in self._begun else -1 for s in sequences]
        self._begun |= {(index, sequence) for sequence in sequences}
        parts = StateParts(
            sizes=tuple(count for _, count in self._runs),
            num_parts=(1,) * len(sequences),
            reads_N=torch.tensor(reads, device=tensors[0].device),
            writes_N=torch.tensor(sequences, device=tensors[0].device),
        )
        return LayerState(tensors=self._states[index], parts=parts)

    def narrow(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return the rows of the needed tokens."""
        return x_TD if self.needed is None else x_TD.index_select(0, self.needed)

    def _attend(
        self,
        index: int,
        sequence: int,
        q_QHD: torch.Tensor,
        k_QKD: torch.Tensor,
        v_QKD: torch.Tensor,
    ) -> torch.Tensor:
        scale = q_QHD.shape[-1] ** -0.5
        if self.bidirectional:
            return _attend_to_all(q_QHD, k_QKD, v_QKD, scale)
        kept = self._kept.get((index, sequence), (k_QKD[:0], v_QKD[:0]))
        k_LKD, v_LKD = torch.cat((kept[0], k_QKD)), torch.cat((kept[1], v_QKD))
        self._kept[index, sequence] = k_LKD, v_LKD
        return reference_attention(q_QHD, k_LKD, v_LKD, scale=scale)


def _attend_to_all(
    q_QHD: torch.Tensor, k_QKD: torch.Tensor, v_QKD: torch.Tensor, scale: float
) -> torch.Tensor:
    q_HQD, k_KQD, v_KQD = (x.double().transpose(0, 1) for x in (q_QHD, k_QKD, v_QKD))
    out_HQD = scaled_dot_product_attention(
        q_HQD[None], k_KQD[None], v_KQD[None], scale=scale, enable_gqa=True
    )
    return out_HQD[0].transpose(0, 1)
