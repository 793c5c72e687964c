"""The tokens of requests whose sampling depends on earlier tokens: penalties and bad words.

Stored on the device as token sequences, not as counters for the whole vocabulary: a step reads only
a row's tokens, and rows without these parameters are not stored. This module does not depend on how
the tokens are used. Dimensions: H slots of the history, L tokens, R rows read in a step, S rows of
the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad

from dovetail_torch.sampling.device_access import Upload

_FIRST_SLOTS = 8
_FIRST_LENGTH = 256
NO_TOKEN = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracked:
    """Rows of one batch that have a history.

    index_R: indices of the rows in the batch. slots_R: slots of these rows in the history. Both are
    int64, on the device. host_slots: `slots_R` on the host.
    """

    index_R: torch.Tensor
    slots_R: torch.Tensor
    host_slots: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """The result of `TokenHistory.read`. Entries beyond a row's length repeat its first entry.

    tokens_RL: int64, prompt and output. counts_RL: float32, number of occurrences of each token in
    the output. lengths_R1: int64.
    """

    tokens_RL: torch.Tensor
    counts_RL: torch.Tensor
    lengths_R1: torch.Tensor


class TokenHistory:
    """Tokens and output counts of some rows. Only the sampler appends to the history."""

    def __init__(self, *, vocab_size: int, device: torch.device, upload: Upload) -> None:
        """upload: sends numbers to `device`."""
        self._vocab_size = vocab_size
        self._device = device
        self._upload = upload
        self._slot_of: dict[int, int] = {}
        self._free: list[int] = []
        self._tokens_HL = torch.zeros(0, _FIRST_LENGTH, dtype=torch.int64, device=device)
        self._counts_HL = torch.zeros(0, _FIRST_LENGTH, dtype=torch.float32, device=device)
        self._lengths_H = torch.zeros(0, dtype=torch.int64, device=device)
        self._lengths: NDArray[np.int64] = np.zeros(0, np.int64)
        self._num_outputs: NDArray[np.int64] = np.zeros(0, np.int64)

    def __contains__(self, row: int) -> bool:
        return row in self._slot_of

    def join(self, row: int, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """Start a new history of `row`.

        Prompt ids outside the vocabulary, such as placeholders of other modalities, are omitted.
        Penalties do not apply to them.
        """
        self.leave(row)
        prompt = np.asarray(prompt_ids, np.int64)
        prompt = prompt[(prompt >= 0) & (prompt < self._vocab_size)]
        output = np.asarray(output_ids, np.int64)
        tokens = np.concatenate((prompt, output))
        self._grow(len(tokens) + 1)
        slot = self._free.pop()
        self._slot_of[row] = slot
        distinct, inverse = np.unique(tokens, return_inverse=True)
        in_output = np.bincount(inverse.reshape(-1)[len(prompt) :], minlength=len(distinct))
        counts = in_output[inverse.reshape(-1)].astype(np.float32)
        self._tokens_HL[slot].zero_()[: len(tokens)] = self._upload(tokens)
        self._counts_HL[slot].zero_()[: len(tokens)] = self._upload(counts)
        # `fill_`, because an assignment would copy the number from the host and wait for the
        # device.
        self._lengths_H[slot].fill_(len(tokens))
        self._lengths[slot] = len(tokens)
        self._num_outputs[slot] = len(output)

    def leave(self, row: int) -> None:
        """Delete the history of `row`, if there is one."""
        if row in self._slot_of:
            self._free.append(self._slot_of.pop(row))

    def track(self, rows: Sequence[int]) -> Tracked | None:
        """Return the rows of the batch that have a history, or None if there are none."""
        if not self._slot_of:
            return None
        index = [i for i, row in enumerate(rows) if row in self._slot_of]
        if not index:
            return None
        slots = np.array([self._slot_of[rows[i]] for i in index], np.int64)
        return Tracked(
            index_R=self._upload(np.array(index, np.int64)),
            slots_R=self._upload(slots),
            host_slots=slots,
        )

    def read(self, tracked: Tracked) -> Past:
        """Return copies of the rows' tokens and counts."""
        longest = max(int(self._lengths[tracked.host_slots].max()), 1)
        lengths_R1 = self._lengths_H.index_select(0, tracked.slots_R).unsqueeze(1)
        tokens_RL = self._tokens_HL[:, :longest].index_select(0, tracked.slots_R)
        counts_RL = self._counts_HL[:, :longest].index_select(0, tracked.slots_R)
        past_RL = torch.arange(longest, device=self._device) >= lengths_R1
        return Past(
            tokens_RL=torch.where(past_RL, tokens_RL[:, :1], tokens_RL),
            counts_RL=torch.where(past_RL, counts_RL[:, :1], counts_RL),
            lengths_R1=lengths_R1,
        )

    def append(self, tracked: Tracked, token_ids_S: torch.Tensor) -> None:
        """Append to each tracked row its token in the batch's `token_ids_S`."""
        slots, lengths = tracked.host_slots, self._lengths[tracked.host_slots]
        self._grow(int(lengths.max()) + 1, slots=0)
        past = self.read(tracked)
        token_R1 = token_ids_S.index_select(0, tracked.index_R).unsqueeze(1)
        same_RL = (past.tokens_RL == token_R1) & (past.lengths_R1 > 0)
        counts_RL = past.counts_RL + same_RL
        count_R1 = (counts_RL * same_RL).amax(-1, keepdim=True).clamp_min_(1)
        self._counts_HL[:, : counts_RL.shape[1]].index_copy_(0, tracked.slots_R, counts_RL)
        end = (tracked.slots_R, past.lengths_R1.squeeze(1))
        self._tokens_HL.index_put_(end, token_R1.squeeze(1))
        self._counts_HL.index_put_(end, count_R1.squeeze(1))
        self._lengths_H.index_copy_(0, tracked.slots_R, end[1] + 1)
        self._lengths[slots] += 1
        self._num_outputs[slots] += 1

    def output_tail(self, row: int, num_tokens: int) -> torch.Tensor:
        """Return the last `num_tokens` generated tokens, padded with NO_TOKEN at the front."""
        slot = self._slot_of[row]
        length, num_outputs = int(self._lengths[slot]), int(self._num_outputs[slot])
        known = min(num_tokens, num_outputs)
        tail = self._tokens_HL[slot, length - known : length]
        return pad(tail, (num_tokens - known, 0), value=NO_TOKEN)

    def _grow(self, length: int, slots: int = 1) -> None:
        num_slots, capacity = self._tokens_HL.shape
        more_length = max(0, max(length, 2 * capacity) - capacity) if length > capacity else 0
        more_slots = max(num_slots, _FIRST_SLOTS) if slots > len(self._free) else 0
        if not more_length and not more_slots:
            return
        self._tokens_HL = pad(self._tokens_HL, (0, more_length, 0, more_slots))
        self._counts_HL = pad(self._counts_HL, (0, more_length, 0, more_slots))
        self._lengths_H = pad(self._lengths_H, (0, more_slots))
        self._lengths = np.pad(self._lengths, (0, more_slots))
        self._num_outputs = np.pad(self._num_outputs, (0, more_slots))
        self._free.extend(range(num_slots, num_slots + more_slots))
