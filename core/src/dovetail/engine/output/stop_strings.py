"""Finds stop strings in a stream of text, even across the pieces in which it arrives.

This module works on characters only. The result does not depend on the pieces: the match that ends
first wins, and among matches with the same end the longest. Text that may be the beginning of a
stop string is held back until more text decides it.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStringFilter:
    """Returns the text of one request up to a stop string."""

    __slots__ = ("_by_first", "_held", "_include", "_longest", "_stops")

    def __init__(self, stops: Sequence[str], *, include_stop_str_in_output: bool = False) -> None:
        """Create a filter. stops: one or more strings. Each has at least one character."""
        if not stops or not all(stops):
            raise ValueError(f"stops={stops!r} must have at least one string, and no empty string")
        self._stops = tuple(stops)
        self._longest = max(map(len, stops))
        self._by_first: dict[str, list[str]] = {}
        for stop in stops:
            self._by_first.setdefault(stop[0], []).append(stop)
        self._include = include_stop_str_in_output
        self._held = ""

    def push(self, piece: str, *, armed: bool = True) -> tuple[str, str | None]:
        """Add the next piece. Return the text to show and the stop string found, if any.

        armed: whether a stop string that ends in this piece is a match; if False it is ordinary
        text. Do not call it again after a match.
        """
        held = self._held
        text = held + piece if held else piece
        if armed and piece:
            match = self._find(text, len(held))
            if match is not None:
                start, stop = match
                self._held = ""
                return text[: start + len(stop) if self._include else start], stop
        border = self._first_to_hold(text)
        if border == len(text):
            self._held = ""
            return text, None
        self._held = text[border:]
        return text[:border], None

    def flush(self) -> str:
        """Return the text that is held back. Call it once, after the last piece."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str, num_old: int) -> tuple[int, str] | None:
        """Return the start and the stop string of the first match that ends after `num_old`."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            first = num_old + 1 - len(stop)
            start = text.find(stop, first if first > 0 else 0)
            if start >= 0:
                match = (start + len(stop), start, stop)
                best = match if best is None else min(best, match)
        return None if best is None else best[1:]

    def _first_to_hold(self, text: str) -> int:
        """Return the start of the longest tail of `text` that is an incomplete stop string.

        Each start is compared with all stop strings before the next one, so that the time is
        proportional to the characters that are no longer held back.
        """
        num, by_first = len(text), self._by_first
        for start in range(max(0, num + 1 - self._longest), num):
            stops = by_first.get(text[start])
            if stops and _is_beginning(text[start:], stops):
                return start
        return num


def _is_beginning(tail: str, stops: Sequence[str]) -> bool:
    """Return whether `tail` is the beginning of a longer stop string."""
    return any(len(stop) > len(tail) and stop.startswith(tail) for stop in stops)
