"""A fake reasoning parser, for reasoning such as <why>I think.</why>."""

from __future__ import annotations

from typing import ClassVar

from dovetail.interfaces.reasoning_parser import (
    ReasoningDelta,
    ReasoningMarkers,
    ReasoningParser,
    ReasoningParserContext,
)

START, END = "<why>", "</why>"


class FakeReasoningParser(ReasoningParser):
    """Reads reasoning between two markers at the start of the text."""

    template_marks: ClassVar[tuple[str, ...]] = (START, END)
    example: ClassVar[str] = "<why>I think.</why>Yes."

    def __init__(self, context: ReasoningParserContext) -> None:
        self._text = ""
        self._marker: str | None = START  # the next marker; None in the content

    def feed(self, text: str) -> ReasoningDelta:
        """Process the next piece of text and return what can be classified so far."""
        self._text += text
        if self._marker == START:
            if self._text.startswith(START):
                self._text, self._marker = self._text.removeprefix(START), END
            elif START.startswith(self._text):
                return ReasoningDelta()  # wait for the rest of the marker
            else:
                self._marker = None
        if self._marker is None:
            return self._rest()
        before, separator, after = self._text.partition(END)
        if separator:
            self._text, self._marker = "", None
            return ReasoningDelta(reasoning=before, content=after)
        sizes = range(len(END) - 1, 0, -1)
        held = next((size for size in sizes if before.endswith(END[:size])), 0)
        self._text = before[len(before) - held :]
        return ReasoningDelta(reasoning=before[: len(before) - held])

    def finish(self) -> ReasoningDelta:
        """Return the text that was held back."""
        return self._rest()

    def markers(self) -> ReasoningMarkers | None:
        """Return the markers of this completion."""
        return ReasoningMarkers(start=START, end=END)

    def _rest(self) -> ReasoningDelta:
        text, self._text = self._text, ""
        if self._marker == END:
            return ReasoningDelta(reasoning=text)
        return ReasoningDelta(content=text)
