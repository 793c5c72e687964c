"""The sampler: samples one token for each row of a step's logits.

Order: raw log-probabilities are computed from the unprocessed logits; then grammar, the request's
masks and biases, penalties, step extensions; then either the most likely token is selected, or
temperature, min-p, top-k and top-p are applied and a token is sampled. Tokens do not depend on the
batch: every random number is a hash of the request's seed and its number of tokens. The result is a
token of the vocabulary for any logits. If all logits of a row are -inf, or one is NaN, it is an
arbitrary token; other rows are not affected.

This module does not depend on plans, models or how tokens are sent to the scheduler. Dimensions: S
rows of the batch, V vocabulary, P rows that requested log-probabilities, R rows of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.plan import NewRequest
from dovetail.result import LogprobColumns
from dovetail_torch.sampling.batch import Batch, RandomGroup
from dovetail_torch.sampling.blocks import best_tokens
from dovetail_torch.sampling.device_access import DeviceAccess, plain_access
from dovetail_torch.sampling.drawing import accumulation_dtype, draw, exponentiate
from dovetail_torch.sampling.grammar import GrammarMask, MaskTokens, mask_tokens
from dovetail_torch.sampling.history import TokenHistory
from dovetail_torch.sampling.logprobs import RowReport, measure
from dovetail_torch.sampling.masks import TokenMasks
from dovetail_torch.sampling.penalties import apply_penalties
from dovetail_torch.sampling.random_numbers import uniforms
from dovetail_torch.sampling.row_table import RowTable
from dovetail_torch.sampling.truncation import Nuclei, apply_min_p, cut
from dovetail_torch.step_extensions import StepExtensions

BestTokens = Callable[[torch.Tensor], torch.Tensor]
"""A function from logits [R, V] to the column of each row's maximum, like `Ops.best_tokens`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """The tokens of a step. token_ids: int64 [S], on the device, in the order of the rows.

    report: raw log-probabilities, if requested; also on the device.
    """

    token_ids: torch.Tensor
    report: RowReport | None = None

    @property
    def logprobs(self) -> Mapping[int, LogprobColumns]:
        """The log-probabilities by index of the row in the batch.

        Reading them waits for the device.
        """
        return {} if self.report is None else self.report.columns(self.report.measured.tensors)


class Sampler:
    """Stores the sampling state of each row, and samples. Called from one thread."""

    def __init__(
        self,
        *,
        num_rows: int,
        vocab_size: int,
        device: torch.device,
        extensions: StepExtensions | None = None,
        best_tokens: BestTokens = best_tokens,
        mask_tokens: MaskTokens = mask_tokens,
        access: DeviceAccess | None = None,
    ) -> None:
        """best_tokens, mask_tokens: functions of the op provider.

        access: None for a synchronous device.
        extensions: step extensions with the hook `logits`, or None. They are notified of new and
        ended requests before the sampler.
        """
        access = access or plain_access(device)
        self._device = device
        self._access = access
        self._best_tokens = best_tokens
        self._mask_tokens = mask_tokens
        wide = accumulation_dtype(device) == torch.float64
        self._dtype: type[np.floating] = np.float64 if wide else np.float32
        self._table = RowTable(
            num_rows=num_rows, vocab_size=vocab_size, access=access, dtype=self._dtype
        )
        self._history = TokenHistory(vocab_size=vocab_size, device=device, upload=access.upload)
        self._masks = TokenMasks(vocab_size=vocab_size, upload=access.upload)
        self._extensions = extensions or StepExtensions({}, access.upload)
        self._float32 = torch.empty(0, vocab_size, dtype=torch.float32, device=device)
        self._special: set[int] = set()
        self._no_batch = self._batch = self._describe(())

    @torch.inference_mode()
    def join(self, request: NewRequest) -> None:
        """Add a new request to its row. The state of the row's previous request is deleted."""
        row, num_prompt = request.row, request.num_prompt_tokens
        self.leave(row)
        self._table.join(request)
        self._masks.join(request)
        if self._table.penalized(row) or self._masks.needs_history(row):
            self._history.join(row, request.token_ids[:num_prompt], request.token_ids[num_prompt:])
        if row in self._masks.rows or not self._is_plain(row):
            self._special.add(row)

    def leave(self, row: int) -> None:
        """Remove the request of `row`, if there is one."""
        self._masks.leave(row)
        self._history.leave(row)
        self._special.discard(row)
        self._batch = self._no_batch

    def takes_best(self, rows: Sequence[int]) -> bool:
        """Return whether all of `rows` take the most likely token of the unchanged logits."""
        return not self._special or self._special.isdisjoint(rows)

    @torch.inference_mode()
    def host_numbers(self, rows: Sequence[int]) -> tuple[NDArray, ...]:
        """Return the host's numbers that the next `sample` of `rows` needs, one per row, or ().

        The caller may send them to the device together with other data, and pass them to `sample`.
        """
        if self.takes_best(rows):
            return ()
        batch = self._describe(rows)
        if batch.greedy is not None and batch.greedy.whole:
            return ()
        positions = self._table.num_tokens[batch.host_rows]
        if batch.draw is not None:
            return (positions,)
        return (uniforms(self._table.seeds[batch.host_rows], positions).astype(self._dtype),)

    @torch.inference_mode()
    def sample(
        self,
        logits_SV: torch.Tensor,
        rows: Sequence[int],
        grammar_bitmask: GrammarMask | None = None,
        numbers: Sequence[torch.Tensor] | None = None,
    ) -> SampledTokens:
        """Sample the next token of each row and append it to the row.

        logits_SV: any float dtype, on the device; row i belongs to rows[i]; may be overwritten.
        rows: rows that have a request, each at most once. numbers: `host_numbers` of the rows, on
        the device; None if they have not been sent.
        """
        if self.takes_best(rows):
            if grammar_bitmask is not None:
                grammar_bitmask.apply(logits_SV, self._mask_tokens)
            return SampledTokens(token_ids=self._best_tokens(logits_SV))
        batch = self._describe(rows)
        if numbers is None:
            numbers = [self._access.upload(column) for column in self.host_numbers(rows)]
        raw_SV = logits_SV
        if batch.reporting is not None and logits_SV.dtype == torch.float32:
            raw_SV = logits_SV.clone()  # the logits are changed in place below
        logits_SV = self._shape(logits_SV, batch, grammar_bitmask)
        token_ids_S = self._choose(logits_SV, batch, numbers)
        if batch.tracked is not None:
            self._history.append(batch.tracked, token_ids_S)
        self._table.num_tokens[batch.host_rows] += 1
        if batch.reporting is None:
            return SampledTokens(token_ids=token_ids_S)
        chosen_P, raw_PV = batch.reporting.select(token_ids_S), batch.reporting.select(raw_SV)
        measured = measure(raw_PV, chosen_P, max(batch.num_logprobs))
        report = RowReport(measured=measured, num_logprobs=batch.num_logprobs)
        return SampledTokens(token_ids=token_ids_S, report=report)

    @torch.inference_mode()
    def distribution(
        self,
        logits_SV: torch.Tensor,
        rows: Sequence[int],
        grammar_bitmask: GrammarMask | None = None,
    ) -> torch.Tensor:
        """Return the probabilities that `sample` would use now, float32 [S, V].

        Does not change rows; the logits may be overwritten. Greedy rows have one token of
        probability 1.
        """
        batch = self._table.describe(tuple(rows), self._history)
        logits_SV = self._shape(logits_SV, batch, grammar_bitmask)
        probs_SV = torch.zeros_like(logits_SV)
        if batch.greedy is not None:
            best_R = self._best_tokens(batch.greedy.select(logits_SV))
            probs_SV[batch.greedy.index_R, best_R] = 1.0
        if batch.unranked is not None:
            weights_RV = exponentiate(_apply_temperature(logits_SV, batch.unranked))
            probs_SV[batch.unranked.index_R] = weights_RV / weights_RV.sum(-1, keepdim=True)
        for index_R, nuclei in self._nuclei(logits_SV, batch):
            probs_RK = (nuclei.weights_RK / nuclei.weights_RK.sum(-1, keepdim=True)).float()
            probs_SV[index_R.unsqueeze(1), nuclei.columns_RK] = probs_RK
        return probs_SV

    def _describe(self, rows: Sequence[int]) -> Batch:
        key = tuple(rows)
        if key and key == self._batch.rows:
            return self._batch
        draws = self._access.draw_tokens is not None
        self._batch = self._table.describe(key, self._history, draws=draws)
        return self._batch

    def _shape(
        self, logits_SV: torch.Tensor, batch: Batch, grammar: GrammarMask | None
    ) -> torch.Tensor:
        """Return float32 logits after masks, penalties and extensions. May be the given tensor."""
        logits_SV = self._widen(logits_SV)
        if grammar is not None:
            grammar.apply(logits_SV, self._mask_tokens)
        done = self._masks.apply(logits_SV, batch.rows, self._table.num_tokens, self._history)
        self._special.difference_update(row for row in done if self._is_plain(row))
        if batch.penalties is not None:
            past = self._history.read(batch.penalties.tracked)
            apply_penalties(logits_SV, batch.penalties, past)
        if self._extensions.logits_rows:
            logits_SV = self._extensions.logits(logits_SV, batch.rows)
        return logits_SV

    def _is_plain(self, row: int) -> bool:
        """Return whether the row takes the top-1 token, and only masks may change its logits."""
        return row not in self._extensions.logits_rows and self._table.plain(row)

    def _widen(self, logits_SV: torch.Tensor) -> torch.Tensor:
        """Return the logits in float32: the given tensor, or a copy in reused memory."""
        if logits_SV.dtype == torch.float32:
            return logits_SV
        if len(self._float32) < len(logits_SV):
            self._float32 = torch.empty_like(logits_SV, dtype=torch.float32)
        return self._float32[: len(logits_SV)].copy_(logits_SV)

    def _choose(
        self, logits_SV: torch.Tensor, batch: Batch, numbers: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Return each row's token. numbers: see `host_numbers`, on the device."""
        if batch.greedy is not None and batch.greedy.whole:
            return self._best_tokens(logits_SV)
        if batch.draw is not None and self._access.draw_tokens is not None:
            return self._access.draw_tokens(logits_SV, batch.draw.at(numbers[0]))
        uniform_S1 = numbers[0].unsqueeze(1)
        token_ids_S = torch.empty(len(logits_SV), dtype=torch.int64, device=self._device)
        if batch.greedy is not None:
            token_ids_S[batch.greedy.index_R] = self._best_tokens(batch.greedy.select(logits_SV))
        for index_R, nuclei in self._nuclei(logits_SV, batch):
            token_ids_S[index_R] = nuclei.draw(uniform_S1[index_R])
        if batch.unranked is not None:
            weights_RV = exponentiate(_apply_temperature(logits_SV, batch.unranked))
            token_ids_S[batch.unranked.index_R] = draw(
                weights_RV, batch.unranked.select(uniform_S1)
            )
        return token_ids_S

    def _nuclei(
        self, logits_SV: torch.Tensor, batch: Batch
    ) -> Iterator[tuple[torch.Tensor, Nuclei]]:
        """Yield the tokens that top-k and top-p keep, with the indices of the rows in the batch."""
        if batch.ranked is not None:
            for nuclei in cut(_apply_temperature(logits_SV, batch.ranked), batch.ranked.cuts):
                yield batch.ranked.index_R[nuclei.index_R], nuclei


def _apply_temperature(logits_SV: torch.Tensor, group: RandomGroup) -> torch.Tensor:
    """Return the group's logits after temperature and min-p. May change the given logits."""
    logits_RV = group.select(logits_SV).div_(group.temperature_R1)
    if group.has_min_p:
        apply_min_p(logits_RV, group.log_min_p_R1)
    return logits_RV
