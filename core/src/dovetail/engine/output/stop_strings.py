"""Stop strings in a stream of text: found over any borders, and never shown too early.

Works on characters only. The text arrives in pieces; which pieces does not matter: the match that
ends first wins, and of those that end together the longest, just as if the characters came one by
one. What may be the beginning of a stop string is held back until that is decided.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStringFilter:
    """Passes the text of one request through until a stop string is in it."""

    __slots__ = ("_held", "_include", "_stops")

    def __init__(self, stops: Sequence[str], *, include_stop_str_in_output: bool = False) -> None:
        """stops: strings of at least one character, at least one of them."""
        if not stops or not all(stops):
            raise ValueError(f"stops={stops!r} must be non-empty strings, at least one")
        self._stops = tuple(stops)
        self._include = include_stop_str_in_output
        self._held = ""

    def push(self, piece: str, *, armed: bool = True) -> tuple[str, str | None]:
        """Take the next piece; return the text to show and the stop string found, if any.

        armed: whether a stop string that ends in this piece counts; one that ends in an unarmed
        piece is ordinary text. After a match nothing may be pushed any more.
        """
        held = self._held
        text = held + piece if held else piece
        if armed and piece:
            found = self._find(text, len(held))
            if found is not None:
                start, stop = found
                self._held = ""
                return text[: start + len(stop) if self._include else start], stop
        border = self._first_to_hold(text)
        if border == len(text):
            self._held = ""
            return text, None
        self._held = text[border:]
        return text[:border], None

    def flush(self) -> str:
        """Return what is held back; call it when no more text will come."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str, num_old: int) -> tuple[int, str] | None:
        """Return start and stop string of the first match that ends beyond `num_old`."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            first = num_old + 1 - len(stop)
            start = text.find(stop, first if first > 0 else 0)
            if start >= 0:
                match = (start + len(stop), start, stop)
                best = match if best is None else min(best, match)
        return None if best is None else best[1:]

    def _first_to_hold(self, text: str) -> int:
        """Return where the longest tail of `text` begins that begins, but is not, a stop string."""
        num = border = len(text)
        for stop in self._stops:
            first = num + 1 - len(stop)
            start = text.find(stop[0], first if first > 0 else 0, border)
            while start >= 0 and not stop.startswith(text[start:]):
                start = text.find(stop[0], start + 1, border)
            if start >= 0:
                border = start
        return border
