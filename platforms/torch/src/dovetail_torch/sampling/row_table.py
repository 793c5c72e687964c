"""The sampling parameters of rows, and the grouping of a batch's rows by these parameters.

The parameters are arrays on the host with one entry per row. The columns of a batch are sent to the
device when the rows of the batch change, not in each step. This module does not depend on logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.plan import NewRequest
from dovetail_torch.sampling.batch import Batch, DrawNumbers, Group, RandomGroup, RankedGroup
from dovetail_torch.sampling.device_access import DeviceAccess
from dovetail_torch.sampling.history import TokenHistory
from dovetail_torch.sampling.penalties import MIN_REPETITION, PenaltyColumns
from dovetail_torch.sampling.truncation import FIRST_BEST, SMALL_TOP_K, Cuts

_UINT64 = 2**64 - 1


class RowTable:
    """Parameters by row.

    num_tokens: length of prompt and output; not updated for greedy rows without penalties and
    log-probabilities. temperature is 0 for greedy rows; top_k is the size of the vocabulary if it
    is disabled.
    """

    def __init__(
        self, *, num_rows: int, vocab_size: int, access: DeviceAccess, dtype: type[np.floating]
    ) -> None:
        """dtype: dtype in which probabilities are accumulated, float64 or float32."""
        self._vocab_size = vocab_size
        self._access = access
        self._dtype = dtype
        self.num_tokens: NDArray[np.int64] = np.zeros(num_rows, np.int64)
        self.seeds: NDArray[np.uint64] = np.zeros(num_rows, np.uint64)
        self._num_logprobs: NDArray[np.int64] = np.full(num_rows, -1, np.int64)
        self._temperature: NDArray[np.float32] = np.zeros(num_rows, np.float32)
        self._top_k: NDArray[np.int64] = np.full(num_rows, vocab_size, np.int64)
        self._top_p: NDArray[np.float64] = np.ones(num_rows, np.float64)
        self._min_p: NDArray[np.float64] = np.zeros(num_rows, np.float64)
        self._repetition: NDArray[np.float32] = np.ones(num_rows, np.float32)
        self._frequency: NDArray[np.float32] = np.zeros(num_rows, np.float32)
        self._presence: NDArray[np.float32] = np.zeros(num_rows, np.float32)

    def join(self, request: NewRequest) -> None:
        """Store all parameters of a new request for its row."""
        row, params = request.row, request.sampling_params
        self.num_tokens[row] = len(request.token_ids)
        self.seeds[row] = request.seed & _UINT64
        self._num_logprobs[row] = -1 if params.logprobs is None else params.logprobs
        self._temperature[row] = 0.0 if params.greedy else params.temperature
        self._top_k[row] = min(params.top_k, self._vocab_size) or self._vocab_size
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._repetition[row] = max(params.repetition_penalty, MIN_REPETITION)
        self._frequency[row] = params.frequency_penalty
        self._presence[row] = params.presence_penalty

    def penalized(self, row: int) -> bool:
        """Whether the row has any penalty."""
        return bool(
            self._repetition[row] != 1.0 or self._frequency[row] != 0 or self._presence[row] != 0
        )

    def plain(self, row: int) -> bool:
        """Whether the row takes the most likely token according to the parameters in this table."""
        greedy = self._temperature[row] == 0 and self._num_logprobs[row] < 0
        return bool(greedy and not self.penalized(row))

    def describe(
        self, rows: tuple[int, ...], history: TokenHistory, *, draws: bool = False
    ) -> Batch:
        """Group the rows of a batch by their parameters.

        draws: whether the op provider samples for the whole batch if any row samples at random.
        """
        host_rows = np.array(rows, np.int64)
        random = self._temperature[host_rows] > 0
        truncated = (self._top_k[host_rows] < self._vocab_size) | (self._top_p[host_rows] < 1)
        num_logprobs = self._num_logprobs[host_rows]
        draws = draws and bool(random.any())
        own = random & (not draws)
        return Batch(
            rows=rows,
            host_rows=host_rows,
            greedy=None if draws else self._group(~random),
            unranked=self._random_group(host_rows, own & ~truncated),
            ranked=self._ranked_group(host_rows, own & truncated),
            draw=self._draw_numbers(host_rows) if draws else None,
            tracked=history.track(rows),
            penalties=self._penalties(rows, history),
            reporting=self._group(num_logprobs >= 0),
            num_logprobs=tuple(num_logprobs.tolist()),
        )

    def _penalties(self, rows: Sequence[int], history: TokenHistory) -> PenaltyColumns | None:
        own = [row for row in rows if self.penalized(row)]
        # Rows without penalties also have an entry, so that indices are those of the batch.
        tracked = history.track([row if self.penalized(row) else -1 for row in rows])
        if tracked is None:
            return None
        return PenaltyColumns(
            tracked=tracked,
            repetition_R1=self._column(self._repetition[own]),
            frequency_R1=self._column(self._frequency[own]),
            presence_R1=self._column(self._presence[own]),
        )

    def _draw_numbers(self, rows: NDArray[np.int64]) -> DrawNumbers:
        upload = self._access.upload
        chances = np.stack((self._temperature[rows], self._top_p[rows], self._min_p[rows]))
        temperature_R, top_p_R, min_p_R = upload(chances.astype(np.float32)).unbind()
        return DrawNumbers(
            temperature_R=temperature_R,
            top_k_R=upload(self._top_k[rows].astype(np.int32)),
            top_p_R=top_p_R,
            min_p_R=min_p_R,
            seeds_R=upload(self.seeds[rows].view(np.int64)),
        )

    def _column(self, values: NDArray[np.generic]) -> torch.Tensor:
        return self._access.upload(values).unsqueeze(1)

    def _group(self, chosen: NDArray[np.bool_]) -> Group | None:
        index = np.flatnonzero(chosen)
        if not len(index):
            return None
        return Group(index_R=self._column(index).squeeze(1), whole=len(index) == len(chosen))

    def _random_group(
        self, rows: NDArray[np.int64], chosen: NDArray[np.bool_]
    ) -> RandomGroup | None:
        group = self._group(chosen)
        if group is None:
            return None
        own = rows[chosen]
        with np.errstate(divide="ignore"):
            log_min_p = np.log(self._min_p[own]).astype(np.float32)
        return RandomGroup(
            index_R=group.index_R,
            whole=group.whole,
            temperature_R1=self._column(self._temperature[own]),
            log_min_p_R1=self._column(log_min_p),
            has_min_p=bool((self._min_p[own] > 0).any()),
        )

    def _ranked_group(
        self, rows: NDArray[np.int64], chosen: NDArray[np.bool_]
    ) -> RankedGroup | None:
        group = self._random_group(rows, chosen)
        if group is None:
            return None
        top_k, top_p = self._top_k[rows[chosen]], self._top_p[rows[chosen]]
        first = int(np.where(top_k <= SMALL_TOP_K, top_k, FIRST_BEST).max())
        settled = bool((top_k <= first).all())
        if not settled and not self._access.may_wait:
            first = self._vocab_size  # a test whether fewer are enough would wait
        cuts = Cuts(
            top_k_R1=self._column(top_k),
            top_p_R1=self._column(top_p.astype(self._dtype)),
            first=first,
            settled=settled,
        )
        return RankedGroup(
            index_R=group.index_R,
            whole=group.whole,
            temperature_R1=group.temperature_R1,
            log_min_p_R1=group.log_min_p_R1,
            has_min_p=group.has_min_p,
            cuts=cuts,
        )
