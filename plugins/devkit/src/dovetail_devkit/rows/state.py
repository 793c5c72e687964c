"""One row of a made-up worker, and the arithmetic that stands for a model.

The "key and value" of a position is a number that stands for every token up to it, and for what an
encoder has made of the content that a placeholder stands for. The next token is computed from the
numbers of all positions. Depends on no block, no plan and no other row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dovetail.plan import NewRequest
from dovetail.request import EncoderInput

MASK = (1 << 64) - 1
MAX_DEPTH = 4
"""Plans that may be out at a time."""

WRONG_ONE_IN = 4
"""Of the drafts."""


def mix(left: int, right: int) -> int:
    """Return a number of 64 bits that depends on both; the finaliser of SplitMix64.

    Source: Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195.
    """
    mixed = (left * 0x9E3779B97F4A7C15 + right + 1) & MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK
    return mixed ^ (mixed >> 31)


def encode(inputs: Iterable[EncoderInput]) -> dict[int, int]:
    """Return what an encoder makes of `inputs`: position to a number, for every placeholder."""
    return {
        one.position + place: mix(int.from_bytes(one.content_hash, "little"), place)
        for one in inputs
        for place in range(one.num_tokens)
    }


def follow(content: int, token: int, encoded: int | None) -> int:
    """Return the number of the position after that of `content`, 0 for the first."""
    content = mix(content, token)
    return content if encoded is None else mix(content, encoded)


def predict_token(
    token_ids: Sequence[int],
    seed: int,
    vocab_size: int,
    encoded: Mapping[int, int] | None = None,
) -> int:
    """Return the token that a right worker samples after `token_ids`, whatever else runs.

    encoded: what `encode` returns for the request.
    """
    known = encoded or {}
    content, attended = 0, 0
    for position, token in enumerate(token_ids):
        content = follow(content, token, known.get(position))
        attended += content
    return mix(attended & MASK, seed) % vocab_size


@dataclass(slots=True, kw_only=True)
class RowState:
    """One row: whose it is, its tokens, its blocks by group, and how far it is computed.

    contents: what the slot of each known position must hold. num_computed: -1 before the first run.
    drafts: held until the next run, which verifies as many of them as its plan says. num_wrong: of
    the last runs that have sampled, how many of the drafts that their plans allowed for were wrong
    or not there: a plan that was made before it knew begins so much later.
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
        """Take the last `num_tokens` tokens away again, and return them."""
        kept = len(self.tokens) - num_tokens
        taken = self.tokens[kept:]
        del self.tokens[kept:], self.contents[kept:]
        return taken

    def draft(self, most: int, vocab_size: int) -> None:
        """Hold 0 to `most` drafts of what comes next; one in four is wrong.

        Both are thrown for with the row's content, so that equal rows get equal drafts.
        """
        dice = mix(self.contents[-1], self.request.seed)
        self.drafts = []
        for place in range(dice % (most + 1)):
            known = [*self.tokens, *self.drafts]
            right = predict_token(known, self.request.seed, vocab_size, self.encoded)
            wrong = not (dice >> (8 + 4 * place)) % WRONG_ONE_IN
            self.drafts.append((right + 1) % vocab_size if wrong else right)
