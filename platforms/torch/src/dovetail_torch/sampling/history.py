"""The tokens of rows whose sampling depends on earlier tokens: penalties and bad words.

Stored on the device as sequences, not as one counter per token of the vocabulary: a step reads only
a row's length, and rows without these parameters are not stored.
Does not depend on how the tokens are used.
Legend: H places for rows, L tokens, R rows read in a step, S rows of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad

from dovetail_torch.sampling.device_access import Upload

_FIRST_PLACES = 8
_FIRST_LENGTH = 256
NO_TOKEN = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracked:
    """Rows of one batch that have a history.

    index_R: indices of the rows in the batch. places_R: places of the rows in the history. Both are
    int64, on the device. host_places: `places_R` on the host.
    """

    index_R: torch.Tensor
    places_R: torch.Tensor
    host_places: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """The result of `TokenHistory.read`; entries beyond a row's length repeat its first entry.

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
        self._place_of: dict[int, int] = {}
        self._free: list[int] = []
        self._tokens_HL = torch.zeros(0, _FIRST_LENGTH, dtype=torch.int64, device=device)
        self._counts_HL = torch.zeros(0, _FIRST_LENGTH, dtype=torch.float32, device=device)
        self._lengths_H = torch.zeros(0, dtype=torch.int64, device=device)
        self._lengths: NDArray[np.int64] = np.zeros(0, np.int64)
        self._num_outputs: NDArray[np.int64] = np.zeros(0, np.int64)

    def __contains__(self, row: int) -> bool:
        return row in self._place_of

    def join(self, row: int, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """Start a new history of `row`. Prompt ids outside the vocabulary are omitted.

        Placeholders of other modalities are such ids; penalties do not apply to them.
        """
        self.leave(row)
        prompt = np.asarray(prompt_ids, np.int64)
        prompt = prompt[(prompt >= 0) & (prompt < self._vocab_size)]
        output = np.asarray(output_ids, np.int64)
        tokens = np.concatenate((prompt, output))
        self._make_room(len(tokens) + 1)
        place = self._free.pop()
        self._place_of[row] = place
        distinct, inverse = np.unique(tokens, return_inverse=True)
        in_output = np.bincount(inverse.reshape(-1)[len(prompt) :], minlength=len(distinct))
        counts = in_output[inverse.reshape(-1)].astype(np.float32)
        self._tokens_HL[place].zero_()[: len(tokens)] = self._upload(tokens)
        self._counts_HL[place].zero_()[: len(tokens)] = self._upload(counts)
        # `fill_` instead of an assignment, which would copy the number from the host and so wait
        # for the device.
        self._lengths_H[place].fill_(len(tokens))
        self._lengths[place] = len(tokens)
        self._num_outputs[place] = len(output)

    def leave(self, row: int) -> None:
        """Delete the history of `row`, if there is one."""
        if row in self._place_of:
            self._free.append(self._place_of.pop(row))

    def track(self, rows: Sequence[int]) -> Tracked | None:
        """Return the rows of the batch that have a history, or None if there are none."""
        if not self._place_of:
            return None
        index = [i for i, row in enumerate(rows) if row in self._place_of]
        if not index:
            return None
        places = np.array([self._place_of[rows[i]] for i in index], np.int64)
        return Tracked(
            index_R=self._upload(np.array(index, np.int64)),
            places_R=self._upload(places),
            host_places=places,
        )

    def read(self, tracked: Tracked) -> Past:
        """Return copies of the rows' tokens and counts."""
        longest = max(int(self._lengths[tracked.host_places].max()), 1)
        lengths_R1 = self._lengths_H.index_select(0, tracked.places_R).unsqueeze(1)
        tokens_RL = self._tokens_HL[:, :longest].index_select(0, tracked.places_R)
        counts_RL = self._counts_HL[:, :longest].index_select(0, tracked.places_R)
        past_RL = torch.arange(longest, device=self._device) >= lengths_R1
        return Past(
            tokens_RL=torch.where(past_RL, tokens_RL[:, :1], tokens_RL),
            counts_RL=torch.where(past_RL, counts_RL[:, :1], counts_RL),
            lengths_R1=lengths_R1,
        )

    def append(self, tracked: Tracked, token_ids_S: torch.Tensor) -> None:
        """Append to each tracked row its token in the batch's `token_ids_S`."""
        places, lengths = tracked.host_places, self._lengths[tracked.host_places]
        self._make_room(int(lengths.max()) + 1, places=0)
        past = self.read(tracked)
        token_R1 = token_ids_S.index_select(0, tracked.index_R).unsqueeze(1)
        same_RL = (past.tokens_RL == token_R1) & (past.lengths_R1 > 0)
        counts_RL = past.counts_RL + same_RL
        count_R1 = (counts_RL * same_RL).amax(-1, keepdim=True).clamp_min_(1)
        self._counts_HL[:, : counts_RL.shape[1]].index_copy_(0, tracked.places_R, counts_RL)
        end = (tracked.places_R, past.lengths_R1.squeeze(1))
        self._tokens_HL.index_put_(end, token_R1.squeeze(1))
        self._counts_HL.index_put_(end, count_R1.squeeze(1))
        self._lengths_H.index_copy_(0, tracked.places_R, end[1] + 1)
        self._lengths[places] += 1
        self._num_outputs[places] += 1

    def output_tail(self, row: int, num_tokens: int) -> torch.Tensor:
        """Return the last `num_tokens` generated tokens, padded with NO_TOKEN at the front."""
        place = self._place_of[row]
        length, num_outputs = int(self._lengths[place]), int(self._num_outputs[place])
        known = min(num_tokens, num_outputs)
        tail = self._tokens_HL[place, length - known : length]
        return pad(tail, (num_tokens - known, 0), value=NO_TOKEN)

    def _make_room(self, length: int, places: int = 1) -> None:
        num_places, capacity = self._tokens_HL.shape
        more_length = max(0, max(length, 2 * capacity) - capacity) if length > capacity else 0
        more_places = max(num_places, _FIRST_PLACES) if places > len(self._free) else 0
        if not more_length and not more_places:
            return
        self._tokens_HL = pad(self._tokens_HL, (0, more_length, 0, more_places))
        self._counts_HL = pad(self._counts_HL, (0, more_length, 0, more_places))
        self._lengths_H = pad(self._lengths_H, (0, more_places))
        self._lengths = np.pad(self._lengths, (0, more_places))
        self._num_outputs = np.pad(self._num_outputs, (0, more_places))
        self._free.extend(range(num_places, num_places + more_places))
