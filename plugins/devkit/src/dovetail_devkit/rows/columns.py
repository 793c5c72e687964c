"""Columns of log-probabilities, and the tokens of grammar bit masks, for fake workers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from dovetail.interfaces.worker import GrammarOutput
from dovetail.result import LogprobColumns


def make_logprobs(token_ids: Sequence[int], num_best: int, vocab_size: int) -> LogprobColumns:
    """Return columns for a request's tokens: each token, then `num_best` fictitious tokens."""
    flat = [(t + j) % vocab_size for t in token_ids for j in (0, *range(num_best))]
    return LogprobColumns(
        counts=array("i", [1 + num_best] * len(token_ids)),
        token_ids=array("i", flat),
        logprobs=array("f", [-1.0] * len(flat)),
        ranks=array("i", [1] * len(token_ids)),
    )


def allowed_tokens(grammar: GrammarOutput | None, vocab_size: int) -> dict[int, frozenset[int]]:
    """Return the tokens that the grammar of each request allows, by position in the plan."""
    if grammar is None:
        return {}
    width = -(-vocab_size // 32) * 4
    allowed = {}
    for index, run in enumerate(grammar.runs):
        bits = int.from_bytes(grammar.bitmask[index * width : (index + 1) * width], "little")
        allowed[run] = frozenset(t for t in range(vocab_size) if bits >> t & 1)
    return allowed
