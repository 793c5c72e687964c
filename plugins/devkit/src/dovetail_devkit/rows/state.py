"""One row of a fake worker, and the arithmetic that replaces a model.

The "key and value" of a position is a hash of all tokens up to it, and of the encoder outputs of
placeholders. The next token is computed from the numbers of all positions. This module does not
depend on blocks, plans or other rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dovetail.plan import NewRequest
from dovetail.request import EncoderInput

MASK = (1 << 64) - 1
MAX_DEPTH = 4
"""Largest number of plans in flight."""

WRONG_ONE_IN = 4
"""One of this many drafts is wrong."""


def mix(left: int, right: int) -> int:
    """Return a 64-bit hash of both numbers. The finalizer of SplitMix64.

    Source: Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195.
    """
    mixed = (left * 0x9E3779B97F4A7C15 + right + 1) & MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK
    return mixed ^ (mixed >> 31)


def encode(inputs: Iterable[EncoderInput]) -> dict[int, int]:
    """Return the encoded `inputs`: a map of placeholder position to a number."""
    return {
        item.position + index: mix(int.from_bytes(item.content_hash, "little"), index)
        for item in inputs
        for index in range(item.num_tokens)
    }


def follow(content: int, token: int, encoded: int | None) -> int:
    """Return the number of a position, given that of the previous position (0 for none)."""
    content = mix(content, token)
    return content if encoded is None else mix(content, encoded)


def predict_token(
    token_ids: Sequence[int],
    seed: int,
    vocab_size: int,
    encoded: Mapping[int, int] | None = None,
) -> int:
    """Return the token that a correct worker samples after `token_ids`.

    encoded: the result of `encode` for the request.
    """
    return next(predict_tokens(token_ids, seed, vocab_size, encoded))


def predict_tokens(
    token_ids: Sequence[int],
    seed: int,
    vocab_size: int,
    encoded: Mapping[int, int] | None = None,
) -> Iterator[int]:
    """Yield the tokens that a correct worker samples after `token_ids`, without end.

    The arguments are those of `predict_token`.
    """
    known = encoded or {}
    content, attended, position = 0, 0, 0
    unread = iter(token_ids)
    while True:
        for token in unread:
            content = follow(content, token, known.get(position))
            attended += content
            position += 1
        token = mix(attended & MASK, seed) % vocab_size
        yield token
        unread = iter((token,))


@dataclass(slots=True, kw_only=True)
class RowState:
    """The state of one row.

    blocks: block tables by group. contents: the expected content of each known position's slot.
    num_computed: number of computed tokens, -1 before the first step. drafts: drafts of the last
    step; the next step verifies the planned number of drafts. num_wrong: for each of the last
    steps that sampled, how many planned drafts were rejected or missing. If a plan was created
    before such a result was known, its start is too large by this number.
    """

    request: NewRequest
    blocks: list[list[int]]
    tokens: list[int] = field(default_factory=list)
    contents: list[int] = field(default_factory=list)
    num_computed: int = -1
    drafts: list[int] = field(default_factory=list)
    num_wrong: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_DEPTH))
    encoded: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.encoded = encode(self.request.encoder_inputs)

    def append(self, token: int) -> None:
        """Add a token."""
        last = self.contents[-1] if self.contents else 0
        self.contents.append(follow(last, token, self.encoded.get(len(self.tokens))))
        self.tokens.append(token)

    def take_last(self, num_tokens: int) -> list[int]:
        """Remove the last `num_tokens` tokens, and return them."""
        kept = len(self.tokens) - num_tokens
        taken = self.tokens[kept:]
        del self.tokens[kept:], self.contents[kept:]
        return taken

    def draft(self, maximum: int, vocab_size: int) -> None:
        """Return up to `maximum` drafts of the next tokens. One in four is wrong.

        The number of drafts and their errors depend on the row's content, so equal rows get equal
        drafts.
        """
        dice = mix(self.contents[-1], self.request.seed)
        self.drafts = []
        for index in range(dice % (maximum + 1)):
            known = [*self.tokens, *self.drafts]
            right = predict_token(known, self.request.seed, vocab_size, self.encoded)
            invalid = not (dice >> (8 + 4 * index)) % WRONG_ONE_IN
            self.drafts.append((right + 1) % vocab_size if invalid else right)
