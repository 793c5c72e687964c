"""Splits strings at random, for parsers that must not depend on the pieces."""

from __future__ import annotations

from random import Random


def random_pieces(text: str, random: Random) -> list[str]:
    """Return pieces of `text` with random lengths, some of them empty."""
    pieces, start = [], 0
    while start < len(text):
        size = random.choice((0, 1, 1, 2, 3, 7, 20))
        pieces.append(text[start : start + size])
        start += size
    return pieces
