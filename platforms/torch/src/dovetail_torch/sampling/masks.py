"""The token constraints of a request: allowed and forbidden tokens, and biases.

In this order: allowed_token_ids; forbidden tokens (bad words, and the tokens that would end the
request before min_tokens); logit_bias. A constraint that would allow no token is skipped. So the
grammar, which is applied first, has priority over allowed_token_ids, which have priority over
forbidden tokens. Ids outside the vocabulary are ignored. This module does not depend on penalties,
temperatures or random numbers. Dimensions: S rows of the batch, V vocabulary, N forbidden (row,
token) pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.plan import NewRequest
from dovetail_torch.sampling.device_access import Upload
from dovetail_torch.sampling.history import TokenHistory

_ANY_TOKEN = -2
_SHORT = 8
"""Words of up to this many tokens are stored together, longer ones with words of similar length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BadWords:
    """Words that must not be completed: their last tokens, and the tokens before the last ones.

    last_W: int64 [W]. before_WL: int64 [W, L], padded at the front with -2, which matches any
    token.
    """

    last_W: torch.Tensor
    before_WL: torch.Tensor

    @classmethod
    def groups(cls, words: Sequence[tuple[int, ...]], upload: Upload) -> list[BadWords]:
        """Return `words` in groups of similar length, so that the padding is limited.

        Otherwise one long word would make all others as long. Each word is a sequence of tokens.
        """
        by_size: dict[int, list[tuple[int, ...]]] = {}
        for word in words:
            by_size.setdefault((max(len(word), _SHORT) - 1).bit_length(), []).append(word)
        return [cls.of(by_size[size], upload) for size in sorted(by_size)]

    @classmethod
    def of(cls, words: Sequence[tuple[int, ...]], upload: Upload) -> BadWords:
        """Create the columns of `words`, each a sequence of tokens. `upload` sends the columns."""
        maximum = max(len(word) for word in words) - 1
        before = [(_ANY_TOKEN,) * (maximum - len(word) + 1) + tuple(word[:-1]) for word in words]
        return cls(
            last_W=upload(np.array([word[-1] for word in words], np.int64)),
            before_WL=upload(np.array(before, np.int64).reshape(len(words), maximum)),
        )

    def matching(self, row: int, history: TokenHistory) -> torch.Tensor:
        """Return which words lack only the last token after the output of `row`, bool [W]."""
        num_before = self.before_WL.shape[1]
        tail_L = history.output_tail(row, num_before) if num_before else self.last_W[:0]
        return ((self.before_WL == tail_L) | (self.before_WL == _ANY_TOKEN)).all(-1)


class TokenMasks:
    """Stores and applies the constraints of rows.

    rows: the constrained rows. A row is removed when its last constraint ends, as min_tokens does.
    """

    def __init__(self, *, vocab_size: int, upload: Upload) -> None:
        """upload: sends numbers to the logits' device."""
        self.rows: set[int] = set()
        self._vocab_size = vocab_size
        self._upload = upload
        self._allowed: dict[int, torch.Tensor] = {}
        self._bad_words: dict[int, list[BadWords]] = {}
        self._unended: dict[int, tuple[int, torch.Tensor]] = {}
        self._bias: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def join(self, request: NewRequest) -> None:
        """Store the constraints of a new request, and delete those of its row's last request."""
        row, params = request.row, request.sampling_params
        self.leave(row)
        if allowed := self._known(params.allowed_token_ids or ()):
            self._allowed[row] = self._ids(allowed)
        words = [w for w in request.bad_words_token_ids if w and len(self._known(w)) == len(w)]
        if words:
            self._bad_words[row] = BadWords.groups(words, self._upload)
        ends = self._known(request.stop_token_ids)
        until = request.num_prompt_tokens + params.min_tokens
        if ends and len(request.token_ids) < until:
            self._unended[row] = (until, self._ids(ends))
        bias_of = params.logit_bias or {}
        if favored := self._known(bias_of):
            bias = np.array([bias_of[token] for token in favored], np.float32)
            self._bias[row] = (self._ids(favored), self._upload(bias))
        self._settle(row)

    def leave(self, row: int) -> None:
        """Delete the constraints of `row`."""
        for by_row in (self._allowed, self._bad_words, self._unended, self._bias):
            by_row.pop(row, None)
        self.rows.discard(row)

    def needs_history(self, row: int) -> bool:
        """Whether the row has bad words of several tokens, so that its output matters."""
        return any(words.before_WL.shape[1] for words in self._bad_words.get(row, ()))

    def apply(
        self,
        logits_SV: torch.Tensor,
        rows: Sequence[int],
        num_tokens: NDArray[np.int64],
        history: TokenHistory,
    ) -> list[int]:
        """Change float32 logits in place. Return the rows whose constraints have all ended.

        num_tokens: number of prompt and output tokens, by row.
        """
        if not self.rows or self.rows.isdisjoint(rows):
            return []
        wishing = [(i, row) for i, row in enumerate(rows) if row in self.rows]
        ended = [row for _, row in wishing if row in self._unended and self._over(row, num_tokens)]
        for row in ended:
            del self._unended[row]
            self._settle(row)
        for i, row in wishing:
            if row in self._allowed:
                _keep_only(logits_SV[i], self._allowed[row])
        self._forbid(logits_SV, wishing, history)
        for i, row in wishing:
            if row in self._bias:
                logits_SV[i].index_add_(0, *self._bias[row])
        return [row for row in ended if row not in self.rows]

    def _over(self, row: int, num_tokens: NDArray[np.int64]) -> bool:
        return bool(num_tokens[row] >= self._unended[row][0])

    def _forbid(
        self, logits_SV: torch.Tensor, wishing: list[tuple[int, int]], history: TokenHistory
    ) -> None:
        pairs = [(i, *pair) for i, row in wishing for pair in self._forbidden(row, history)]
        if pairs:
            positions, ids, active = zip(*pairs, strict=True)
            place_N = self._upload(np.repeat(np.array(positions, np.int64), [len(x) for x in ids]))
            _forbid_pairs(logits_SV, (place_N, torch.cat(ids)), torch.cat(active))

    def _forbidden(
        self, row: int, history: TokenHistory
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield token ids with, for each id, whether it is forbidden in this step."""
        for words in self._bad_words.get(row, ()):
            yield words.last_W, words.matching(row, history)
        if row in self._unended:
            ids = self._unended[row][1]
            yield ids, torch.ones_like(ids, dtype=torch.bool)

    def _settle(self, row: int) -> None:
        tables = (self._allowed, self._bad_words, self._unended, self._bias)
        if any(row in table for table in tables):
            self.rows.add(row)
        else:
            self.rows.discard(row)

    def _known(self, token_ids: Iterable[int]) -> list[int]:
        return [token for token in token_ids if 0 <= token < self._vocab_size]

    def _ids(self, token_ids: Sequence[int]) -> torch.Tensor:
        return self._upload(np.array(token_ids, np.int64))


def _keep_only(logits_V: torch.Tensor, ids_N: torch.Tensor) -> None:
    kept_N = logits_V[ids_N]
    new_V = torch.full_like(logits_V, -torch.inf).index_copy_(0, ids_N, kept_N)
    logits_V.copy_(torch.where(kept_N.amax() == -torch.inf, logits_V, new_V))


def _forbid_pairs(
    logits_SV: torch.Tensor,
    at: tuple[torch.Tensor, torch.Tensor],
    active_N: torch.Tensor,
) -> None:
    """Set the active pairs `at` to -inf, unless no token of their row would be allowed.

    Adding is correct even if a pair occurs twice, once active and once inactive; an assignment
    would be incorrect.
    """
    old_N = logits_SV[at]
    addend_N = torch.where(active_N, -torch.inf, 0.0)
    logits_SV.index_put_(at, addend_N, accumulate=True)
    empty_S = logits_SV.amax(-1) == -torch.inf
    logits_SV.index_put_(at, torch.where(empty_S[at[0]], old_N, logits_SV[at]))
