"""Log-probabilities of a growing sequence, stored as columns. Objects are created on access.

A long prompt with many log-probabilities has millions of entries. As objects they would take
gigabytes, and the garbage collector would scan them repeatedly.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import eq as _equal
from typing import Any

from dovetail.result import LogprobColumns


@dataclass(slots=True)
class Logprob:
    """The log-probability of a token.

    logprob: natural logarithm. rank: 1 for the most likely token of the vocabulary.
    decoded_token: the text of the token, or None without detokenization.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]
"""Token id to `Logprob`: first the token at this position, then the most likely ones in order."""


class LogprobSequence(Sequence[Any]):
    """The log-probabilities of consecutive tokens: a read-only sequence of `TokenLogprobs`.

    They are stored as columns of numbers, 8 bytes per entry. Each access creates a dictionary of
    `Logprob` objects. The entry of the first token of a prompt is None.
    A sequence is equal to a list with the same entries. A slice, and a concatenation with a list,
    are lists.
    """

    __slots__ = ("_num_positions", "_store")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, store: LogprobStore) -> None:
        """Create a view of the current positions of `store`. Later ones are not included."""
        self._store = store
        self._num_positions = len(store)

    def __len__(self) -> int:
        return self._num_positions

    def __getitem__(self, index: int | slice) -> Any:
        positions = range(self._num_positions)[index]  # may raise IndexError
        if isinstance(positions, range):
            return [self._store.at(position) for position in positions]
        return self._store.at(positions)

    def __iter__(self) -> Iterator[TokenLogprobs | None]:
        return map(self._store.at, range(self._num_positions))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, list | LogprobSequence):
            return NotImplemented
        return len(self) == len(other) and all(map(_equal, self, other))

    def __add__(self, other: Sequence[Any]) -> list[Any]:
        return [*self, *other]

    def __radd__(self, other: Sequence[Any]) -> list[Any]:
        return [*other, *self]

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)  # copied as a list, which has no reference to the tokenizer


class LogprobStore:
    """Append-only columns of log-probabilities, one position per token."""

    __slots__ = ("_ends", "_logprobs", "_ranks", "_texts", "_token_ids")

    def __init__(self, texts: Mapping[int, str | None]) -> None:
        """Create an empty store. texts: the string of each token, read on access."""
        self._texts = texts
        self._ends = array(
            "q"
        )  # the end of each position's entries in `_token_ids` and `_logprobs`
        self._ranks = array("i")
        self._token_ids = array("i")
        self._logprobs = array("f")

    def __len__(self) -> int:
        return len(self._ends)

    def empty(self) -> LogprobStore:
        """Return an empty store with the same strings."""
        return LogprobStore(self._texts)

    def add_unknown(self) -> None:
        """Append a position without log-probabilities."""
        self._ends.append(len(self._token_ids))
        self._ranks.append(0)

    def extend(self, columns: LogprobColumns) -> None:
        """Append several positions with their log-probabilities."""
        num_entries = len(self._token_ids)
        if len(columns.counts) == 1:
            self._ends.append(num_entries + columns.counts[0])
        else:
            ends = accumulate(columns.counts, initial=num_entries)
            next(ends)
            self._ends.extend(ends)
        self._ranks.extend(columns.ranks)
        self._token_ids.extend(columns.token_ids)
        self._logprobs.extend(columns.logprobs)

    def at(self, position: int) -> TokenLogprobs | None:
        """Return the entries at a position: its token, then the most likely ones."""
        start, end = self._ends[position - 1] if position else 0, self._ends[position]
        if start == end:
            return None
        token_ids, logprobs, texts = self._token_ids, self._logprobs, self._texts
        first = token_ids[start]
        by_token = {first: Logprob(logprobs[start], self._ranks[position], texts[first])}
        for rank in range(1, end - start):
            token = token_ids[start + rank]
            if token not in by_token:
                by_token[token] = Logprob(logprobs[start + rank], rank, texts[token])
        return by_token
