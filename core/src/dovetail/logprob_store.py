"""Log-probabilities of a sequence as it grows, kept as columns; objects are made on access.

A long prompt with many log-probabilities has millions of entries. As objects they would take
gigabytes, and the garbage collector would look at all of them again and again.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from itertools import accumulate

from dovetail.outputs import Logprob, TokenLogprobs
from dovetail.result import LogprobColumns


class LogprobStore:
    """Append-only columns of log-probabilities, one position a token."""

    __slots__ = ("_ends", "_logprobs", "_ranks", "_texts", "_token_ids")

    def __init__(self, texts: Mapping[int, str | None]) -> None:
        """texts: the text of each token; read on access."""
        self._texts = texts
        self._ends = array("q")  # of each position's entries in the two columns of entries
        self._ranks = array("i")
        self._token_ids = array("i")
        self._logprobs = array("f")

    def __len__(self) -> int:
        return len(self._ends)

    def empty(self) -> LogprobStore:
        """Return a store of the same texts without positions."""
        return LogprobStore(self._texts)

    def add_unknown(self) -> None:
        """Append a position of which nothing is known."""
        self._ends.append(len(self._token_ids))
        self._ranks.append(0)

    def extend(self, columns: LogprobColumns) -> None:
        """Append positions."""
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
        """Return the entries at a position: the token that stands there, then the best."""
        start, end = self._ends[position - 1] if position else 0, self._ends[position]
        if start == end:
            return None
        token_ids, logprobs, texts = self._token_ids, self._logprobs, self._texts
        first = token_ids[start]
        found = {first: Logprob(logprobs[start], self._ranks[position], texts[first])}
        for rank in range(1, end - start):
            token = token_ids[start + rank]
            if token not in found:
                found[token] = Logprob(logprobs[start + rank], rank, texts[token])
        return found
