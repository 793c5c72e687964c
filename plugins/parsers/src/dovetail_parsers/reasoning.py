"""Reasoning parsers: families with a pair of markers, and the channels of harmony."""

from __future__ import annotations

from typing import ClassVar

from dovetail.interfaces import (
    ReasoningDelta,
    ReasoningMarkers,
    ReasoningParser,
    ReasoningParserContext,
)
from dovetail_parsers.cursor import Cursor, Steps
from dovetail_parsers.harmony import ENDS, STARTS, read_header


class StreamedReasoningParser(ReasoningParser):
    """Runs the generator `_parse` of a format."""

    def __init__(self, context: ReasoningParserContext) -> None:
        self.cursor = Cursor()
        self._context = context
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._steps = self._parse()

    def feed(self, text: str) -> ReasoningDelta:
        """Process the next piece of text and return what can be classified so far."""
        self.cursor.add(text)
        next(self._steps, None)
        return self._new()

    def finish(self) -> ReasoningDelta:
        """Return the text that was held back. Called at the end of the text."""
        self.cursor.ended = True
        next(self._steps, None)
        return self._new()

    def _parse(self) -> Steps[None]:
        raise NotImplementedError

    def _reasoning_text(self, text: str) -> None:
        self._reasoning.append(text)

    def _content_text(self, text: str) -> None:
        self._content.append(text)

    def _new(self) -> ReasoningDelta:
        delta = ReasoningDelta(reasoning="".join(self._reasoning), content="".join(self._content))
        self._reasoning, self._content = [], []
        return delta


class MarkedReasoningParser(StreamedReasoningParser):
    """Reasoning between two markers at the start of the text.

    starts: the markers before the reasoning, which the end of the prompt may already contain.
    ends: the markers after it. always: whether the text starts with reasoning in every case.
    """

    starts: ClassVar[tuple[str, ...]] = ("<think>",)
    ends: ClassVar[tuple[str, ...]] = ("</think>",)
    always: ClassVar[bool] = False

    def markers(self) -> ReasoningMarkers | None:
        """Return the markers of this completion."""
        is_open = self.always or self._prompt_opens()
        return ReasoningMarkers(end=self.ends[0], start="" if is_open else self.starts[0])

    def _parse(self) -> Steps[None]:
        cursor = self.cursor
        cursor.record("")
        yield from cursor.skip_space()
        is_open = self.always or self._prompt_opens()
        for start in self.starts:
            if (yield from cursor.accept(start)):
                is_open = True
                break
        else:
            space = cursor.stop_recording() or ""
            self._reasoning_text(space) if is_open else self._content_text(space)
        cursor.stop_recording()
        if is_open:
            yield from cursor.until(self.ends, self._reasoning_text)
            yield from cursor.skip_space()
        yield from cursor.rest(self._content_text)

    def _prompt_opens(self) -> bool:
        """Return whether the prompt ends inside the reasoning."""
        prompt = self._context.prompt_end
        opened = max(prompt.rfind(start) for start in self.starts)
        return opened > max(prompt.rfind(end) for end in self.ends)


class ThinkReasoningParser(MarkedReasoningParser):
    """Qwen3, GLM-4.5, SmolLM3 and others: <think>…</think>."""

    template_marks: ClassVar[tuple[str, ...]] = ("</think>",)
    example = "<think>I think.</think>\n\nYes."


class DeepSeekR1ReasoningParser(MarkedReasoningParser):
    """DeepSeek R1: reasoning up to </think>, with or without <think> before it."""

    template_marks: ClassVar[tuple[str, ...]] = ("</think>", "<｜Assistant｜><think>")
    example = "I think.</think>\n\nYes."
    always = True


class MistralReasoningParser(MarkedReasoningParser):
    """Magistral: [THINK]…[/THINK]."""

    template_marks: ClassVar[tuple[str, ...]] = ("[THINK]", "[/THINK]")
    example = "[THINK]I think.[/THINK]Yes."
    starts = ("[THINK]",)
    ends = ("[/THINK]",)


class CommandReasoningParser(MarkedReasoningParser):
    """Command A: <|START_THINKING|>…<|END_THINKING|>."""

    template_marks: ClassVar[tuple[str, ...]] = ("<|START_THINKING|>",)
    example = "<|START_THINKING|>I think.<|END_THINKING|>Yes."
    starts = ("<|START_THINKING|>",)
    ends = ("<|END_THINKING|>",)


class KimiReasoningParser(MarkedReasoningParser):
    """Kimi: ◁think▷…◁/think▷."""

    template_marks: ClassVar[tuple[str, ...]] = ("◁think▷",)
    example = "◁think▷I think.◁/think▷Yes."
    starts = ("◁think▷",)
    ends = ("◁/think▷",)


class SeedReasoningParser(MarkedReasoningParser):
    """Seed-OSS: <seed:think>…</seed:think>."""

    template_marks: ClassVar[tuple[str, ...]] = ("<seed:think>",)
    example = "<seed:think>I think.</seed:think>Yes."
    starts = ("<seed:think>",)
    ends = ("</seed:think>",)


class GraniteReasoningParser(MarkedReasoningParser):
    """Granite 3.2: "Here is my thought process:" and "Here is my response:"."""

    template_marks: ClassVar[tuple[str, ...]] = ("Here is my thought process:",)
    example = "Here is my thought process:I think.Here is my response:Yes."
    starts = ("Here is my thought process:", "Here's my thought process:")
    ends = ("Here is my response:", "Here's my response:")

    def _prompt_opens(self) -> bool:
        # The system message mentions both markers, so the prompt cannot show whether it is open.
        return False


class HarmonyReasoningParser(StreamedReasoningParser):
    """gpt-oss: the channel `analysis` is reasoning.

    Calls are left unchanged for the tool parser.
    """

    template_marks: ClassVar[tuple[str, ...]] = ("<|channel|>", "<|message|>")
    example = (
        "<|channel|>analysis<|message|>I think.<|end|><|start|>assistant<|channel|>final<|message|>"
        "Yes."
    )

    def markers(self) -> ReasoningMarkers | None:
        """Return the markers of this completion. The model always begins with reasoning."""
        return ReasoningMarkers(
            end="<|end|><|start|>assistant", answer="<|channel|>final<|message|>"
        )

    def _parse(self) -> Steps[None]:
        cursor, is_call, emit = self.cursor, False, self._content_text
        while marker := (yield from cursor.until(STARTS + ENDS, emit)):
            if marker in ENDS:
                self._content_text(marker if is_call else "")
                is_call, emit = False, self._content_text
                continue
            cursor.record(marker)
            header = yield from read_header(cursor, marker)
            read = cursor.stop_recording() or ""
            is_call = header is not None and bool(header.function)
            if header is None or is_call:
                self._content_text(read)
            reasons = header is not None and header.channel == "analysis" and not is_call
            emit = self._reasoning_text if reasons else self._content_text
