"""The conformance suite of the reasoning parser contract. It reads the parser's `example`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from dovetail.interfaces.reasoning_parser import (
    ReasoningDelta,
    ReasoningMarkers,
    ReasoningParser,
    ReasoningParserContext,
)
from dovetail_devkit.expectation import checking, expect
from dovetail_devkit.fakes.tokenizer import ByteTokenizer
from dovetail_devkit.text_pieces import random_pieces

REASONING, CONTENT = "I think.", "Yes."
NUM_SPLITS = 20
PLAIN_TEXTS = ("", "Hello, world.", "1 < 2 and {3}", "a\n\nb <", "é€")

Parts = tuple[str, str]


@checking("reasoning_parser")
def check_reasoning_parser(
    parser_cls: type[ReasoningParser], *, options: Mapping[str, object] | None = None
) -> None:
    """Check a parser against its contract. Raise AssertionError with the violated rule.

    options: constructor options of the parser.
    """
    suite = _Suite(parser_cls, options or {})
    suite.check_example()
    suite.check_plain_texts()
    suite.check_damaged_texts()
    suite.check_markers()


class _Suite:
    def __init__(self, cls: type[ReasoningParser], options: Mapping[str, object]) -> None:
        self._cls = cls
        self._options = options

    def check_example(self) -> None:
        """Check that the example is separated correctly, even while it is generated."""
        text = self._cls.example
        expect(bool(text), "the attribute `example` is empty")
        parsed = self._read([text])
        expect(
            parsed == (REASONING, CONTENT),
            f"example must have the reasoning {REASONING!r} and the content {CONTENT!r}; found "
            f"{parsed}",
        )
        self._check_splits(text, parsed)
        parser = self._make()
        early = [parser.feed(char) for char in text]
        expect(
            "".join(item.reasoning for item in early) == REASONING,
            "feed must return the reasoning as it is generated, not at the end",
        )

    def check_plain_texts(self) -> None:
        """Check that no text is lost without a marker."""
        for text in PLAIN_TEXTS:
            parsed = self._read([text])
            expect(
                "".join(parsed) == text,
                f"the text {text!r} has no marker, but gives the parts {parsed}",
            )
            self._check_splits(text, parsed)

    def check_damaged_texts(self) -> None:
        """Check that no text raises an error, and that the result does not depend on the pieces."""
        text, random = self._cls.example, Random(1)
        for size in range(len(text)):
            self._check_splits(text[:size], self._read([text[:size]]), num_splits=2)
        for _ in range(NUM_SPLITS):
            chars = list(text)
            random.shuffle(chars)
            shuffled = "".join(chars)
            self._check_splits(shuffled, self._read([shuffled]), num_splits=2)

    def check_markers(self) -> None:
        """Check that the markers separate a text."""
        markers = self._make().markers()
        if markers is None:
            return
        expect(
            isinstance(markers, ReasoningMarkers) and bool(markers.end),
            "markers must return None, or ReasoningMarkers with an end",
        )
        if markers.start:
            text = markers.start + REASONING + markers.end + markers.answer + CONTENT
            parsed = self._read([text])
            expect(
                parsed == (REASONING, CONTENT),
                f"the text {text!r}, which has the markers, gives the parts {parsed}",
            )

    def _check_splits(self, text: str, whole: Parts, num_splits: int = NUM_SPLITS) -> None:
        splits = [list(text)] + [random_pieces(text, Random(seed)) for seed in range(num_splits)]
        for pieces in splits:
            parsed = self._read(pieces)
            expect(
                parsed == whole,
                f"the pieces {pieces!r:.300} give {parsed}, but the whole text gives {whole}",
            )

    def _make(self) -> ReasoningParser:
        context = ReasoningParserContext(tokenizer=ByteTokenizer(), options=self._options)
        return self._cls(context)

    def _read(self, pieces: Sequence[str]) -> Parts:
        parser = self._make()
        deltas = [*(parser.feed(piece) for piece in pieces), parser.finish()]
        for delta in deltas:
            expect(
                isinstance(delta, ReasoningDelta), "feed and finish must return a ReasoningDelta"
            )
        return "".join(delta.reasoning for delta in deltas), "".join(
            delta.content for delta in deltas
        )
