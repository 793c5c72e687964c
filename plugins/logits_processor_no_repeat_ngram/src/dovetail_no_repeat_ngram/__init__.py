"""Prevents repeated sequences of n tokens in prompt and output: `no_repeat_ngram`.

A request enables it with `extra_args={"no_repeat_ngram_size": n}`. Then a token is forbidden if it
would complete a sequence of n tokens that already occurs in the prompt or output. Source: Paulus,
Xiong, Socher 2017, arXiv:1705.04304, section 2.5; other libraries use the same rule.
Dimensions: S rows of the step, V vocabulary, R rows of this processor, N forbidden tokens of a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import torch

from dovetail.errors import RequestError
from dovetail.interfaces import LogitsProcessor, LogitsProcessorContext
from dovetail.plan import NewRequest
from dovetail.sampling_params import SamplingParams

__all__ = ["ARGUMENT", "MAX_SIZE", "NoRepeatNgram"]

ARGUMENT = "no_repeat_ngram_size"
"""The key in `extra_args`."""
MAX_SIZE = 64


class _Row:
    """Maps each sequence of n - 1 tokens of a request to the tokens that have followed it."""

    __slots__ = ("_followers", "_tail", "_tail_length")

    def __init__(self, size: int, token_ids: Iterable[int]) -> None:
        self._tail_length = size - 1
        self._tail: tuple[int, ...] = ()
        self._followers: dict[tuple[int, ...], list[int]] = {}
        for token in token_ids:
            self.append(token)

    def append(self, token: int) -> None:
        """Append the next token."""
        if len(self._tail) == self._tail_length:
            self._followers.setdefault(self._tail, []).append(token)
        if self._tail_length:
            self._tail = (*self._tail, token)[-self._tail_length :]

    def forbidden(self) -> list[int]:
        """Return the tokens that the next token must not be."""
        return self._followers.get(self._tail, [])


class NoRepeatNgram(LogitsProcessor):
    """Forbids tokens that would repeat a sequence, unless no other token is left.

    The tokens of a row are stored on the host, so each step waits for its sampled tokens. On a CPU
    this takes a few microseconds; any other device must be synchronized. Requests without the
    argument have no cost.
    """

    CONTRACT_VERSION: ClassVar[str] = "0.1"
    example_args: ClassVar[Mapping[str, object]] = {ARGUMENT: 3}

    def __init__(self, context: LogitsProcessorContext) -> None:
        self._vocab_size = context.vocab_size
        self._device = context.device
        self._rows: dict[int, _Row] = {}

    @classmethod
    def check_params(cls, params: SamplingParams) -> None:
        """Raise RequestError unless the size is absent, None or an integer from 0 (off) to 64."""
        size = params.extra_args.get(ARGUMENT)
        valid = isinstance(size, int) and not isinstance(size, bool) and 0 <= size <= MAX_SIZE
        if size is not None and not valid:
            raise RequestError(
                f"extra_args[{ARGUMENT!r}]={size!r:.80} must be an integer from 1 to {MAX_SIZE}, "
                "or 0 for no limit.",
                parameter=f"extra_args.{ARGUMENT}",
            )

    def join(self, request: NewRequest) -> bool:
        """Return whether the request has the argument. If it has, read all its tokens."""
        self.leave(request.row)
        size = request.sampling_params.extra_args.get(ARGUMENT)
        if not isinstance(size, int) or not size:
            return False
        self._rows[request.row] = _Row(size, request.token_ids)
        return True

    def leave(self, row: int) -> None:
        """Remove the state of `row`."""
        self._rows.pop(row, None)

    def apply(self, logits_SV: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Set forbidden tokens to -inf in place. Skip a row that would have no token left."""
        for index, row in enumerate(rows):
            own = self._rows.get(row)
            forbidden = own.forbidden() if own is not None else []
            # Placeholders in a prompt have ids outside the vocabulary and no logits.
            known = [token for token in forbidden if 0 <= token < self._vocab_size]
            if known:
                ids_N = torch.tensor(known, dtype=torch.int64).to(self._device, non_blocking=True)
                old_V = logits_SV[index]
                new_V = old_V.index_fill(0, ids_N, -torch.inf)
                old_V.copy_(torch.where(new_V.amax() == -torch.inf, old_V, new_V))
        return logits_SV

    def accept(self, rows: Sequence[int], token_ids_R: torch.Tensor) -> None:
        """Append the sampled token of each row."""
        for row, token in zip(rows, token_ids_R.tolist(), strict=True):
            self._rows[row].append(token)
