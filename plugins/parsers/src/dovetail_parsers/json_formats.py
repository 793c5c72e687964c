"""Tool parsers of the formats whose arguments are JSON."""

from __future__ import annotations

import uuid
from typing import ClassVar

from dovetail_parsers.base import EXAMPLE, JSON_CALL, MarkedToolParser
from dovetail_parsers.cursor import Steps


class HermesToolParser(MarkedToolParser):
    """Hermes, Qwen2.5 and Qwen3: <tool_call>{"name": "f", "arguments": {}}</tool_call>."""

    template_marks: ClassVar[tuple[str, ...]] = ("<tool_call>", '"name"', '"arguments"')
    example = f'<tool_call>\n{{"name": "get_weather", "arguments": {EXAMPLE}}}\n</tool_call>'
    call_begin, call_end, call_trigger = JSON_CALL, "}\n</tool_call>", "<tool_call>"
    opens = ("<tool_call>",)
    closes = ("</tool_call>",)


class GraniteToolParser(MarkedToolParser):
    """Granite 3: <|tool_call|>[{"name": "f", "arguments": {}}], also with <tool_call>."""

    template_marks: ClassVar[tuple[str, ...]] = ("<|start_of_role|>", "tool_call")
    example = f'<|tool_call|>[{{"name": "get_weather", "arguments": {EXAMPLE}}}]'
    call_begin = '<|tool_call|>[{"name": "FUNCTION", "arguments": '
    call_end, call_trigger = "}]", "<|tool_call|>"
    opens = ("<|tool_call|>", "<tool_call>")
    closes = ("</tool_call>",)


class Phi4MiniToolParser(MarkedToolParser):
    """Phi-4-mini: <|tool_call|>[{"name": "f", "arguments": {}}]<|/tool_call|>, or functools[…]."""

    template_marks: ClassVar[tuple[str, ...]] = ("<|tool|>", "<|/tool|>")
    example = f'<|tool_call|>[{{"name": "get_weather", "arguments": {EXAMPLE}}}]<|/tool_call|>'
    call_begin = '<|tool_call|>[{"name": "FUNCTION", "arguments": '
    call_end, call_trigger = "}]<|/tool_call|>", "<|tool_call|>"
    opens = ("<|tool_call|>", "functools")
    closes = ("<|/tool_call|>",)


class CommandRToolParser(MarkedToolParser):
    """Command R: <|START_ACTION|>[{"tool_name": "f", "parameters": {}}]<|END_ACTION|>."""

    template_marks: ClassVar[tuple[str, ...]] = ("<|CHATBOT_TOKEN|>", "tool_name")
    example = (
        f'<|START_ACTION|>[{{"tool_name": "get_weather", "parameters": {EXAMPLE}}}]<|END_ACTION|>'
    )
    call_begin = '<|START_ACTION|>[{"tool_name": "FUNCTION", "parameters": '
    call_end, call_trigger = "}]<|END_ACTION|>", "<|START_ACTION|>"
    opens = ("<|START_ACTION|>", "Action: ```json", "Action:```json")
    closes = ("<|END_ACTION|>", "```")


class MistralToolParser(MarkedToolParser):
    """Mistral: [TOOL_CALLS][{"name": "f", "arguments": {}}], or [TOOL_CALLS]f[ARGS]{}."""

    template_marks: ClassVar[tuple[str, ...]] = ("[TOOL_CALLS]",)
    example = f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {EXAMPLE}}}]'
    call_begin = '[TOOL_CALLS][{"name": "FUNCTION", "arguments": '
    call_end, call_trigger = "}]", "[TOOL_CALLS]"
    opens = ("[TOOL_CALLS]",)

    @classmethod
    def new_call_id(cls) -> str:
        """Return an id of nine characters, the only length that the templates accept."""
        return uuid.uuid4().hex[:9]

    def _read(self, marker: str) -> Steps[bool]:
        self.cursor.record(marker)
        char = yield from self.cursor.skip_space()
        before = self._recorded()
        if char and char in "[{":
            return (yield from self.json_calls(before))
        return (yield from self.attempt(before, self._named()))

    def _named(self) -> Steps[None]:
        name, stop = yield from self.cursor.word(("[CALL_ID]", "[ARGS]", "{"))
        if stop == "[CALL_ID]":
            _, stop = yield from self.cursor.word(("[ARGS]",))
        self.open_call(name.strip())
        if stop == "{":
            self.arguments("{")
            yield from self.cursor.rest_of_object(self.arguments)
        else:
            yield from self.cursor.json_value(self.arguments)


class DeepSeekToolParser(MarkedToolParser):
    """DeepSeek V3 (a function, then a block of JSON) and V3.1 (a function, then JSON)."""

    template_marks: ClassVar[tuple[str, ...]] = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>")
    example = (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        f"{EXAMPLE}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    )
    call_begin = (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>FUNCTION\n```json\n"
    )
    call_end = "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    call_trigger = "<｜tool▁calls▁begin｜>"
    opens = ("<｜tool▁call▁begin｜>", "<｜tool▁calls▁begin｜>")
    closes = ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")

    def _read(self, marker: str) -> Steps[bool]:
        if marker == "<｜tool▁calls▁begin｜>":
            return (yield from self.attempt(marker, self._first()))
        return (yield from self.attempt(marker, self._one()))

    def _first(self) -> Steps[None]:
        yield from self.cursor.skip_space()
        yield from self.cursor.expect("<｜tool▁call▁begin｜>")
        yield from self._one()

    def _one(self) -> Steps[None]:
        name, _ = yield from self.cursor.word(("<｜tool▁sep｜>",))
        fenced = name.strip() == "function"
        if fenced:
            name, _ = yield from self.cursor.word(("\n",))
            yield from self.cursor.skip_space()
            yield from self.cursor.expect("```json")
        self.open_call(name.strip())
        yield from self.cursor.json_value(self.arguments)
        if fenced:
            yield from self.cursor.skip_space()
            yield from self.cursor.accept("```")


class KimiK2ToolParser(MarkedToolParser):
    """Kimi K2: <|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>."""

    template_marks: ClassVar[tuple[str, ...]] = ("<|tool_call_begin|>",)
    example = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        f"<|tool_call_argument_begin|>{EXAMPLE}<|tool_call_end|><|tool_calls_section_end|>"
    )
    call_begin = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.FUNCTION:0"
        "<|tool_call_argument_begin|>"
    )
    call_end = "<|tool_call_end|><|tool_calls_section_end|>"
    call_trigger = "<|tool_calls_section_begin|>"
    opens = ("<|tool_call_begin|>", "<|tool_calls_section_begin|>")
    closes = ("<|tool_call_end|>", "<|tool_calls_section_end|>")

    def _read(self, marker: str) -> Steps[bool]:
        return (yield from self.attempt(marker, self._one(marker)))

    def _one(self, marker: str) -> Steps[None]:
        if marker == "<|tool_calls_section_begin|>":
            yield from self.cursor.skip_space()
            yield from self.cursor.expect("<|tool_call_begin|>")
        name, _ = yield from self.cursor.word(("<|tool_call_argument_begin|>",))
        name = name.strip().removeprefix("functions.")
        self.open_call(name.rpartition(":")[0] or name)
        yield from self.cursor.json_value(self.arguments)


class Llama3ToolParser(MarkedToolParser):
    """Llama 3: the whole text is {"name": "f", "parameters": {}}, or it follows <|python_tag|>."""

    template_marks: ClassVar[tuple[str, ...]] = ("<|start_header_id|>", '"parameters"')
    example = f'{{"name": "get_weather", "parameters": {EXAMPLE}}}'
    call_begin, call_end = '{"name": "FUNCTION", "parameters": ', "}"
    call_separator = "; "
    opens = ("<|python_tag|>",)

    def _parse(self) -> Steps[None]:
        self.cursor.record("")
        char = yield from self.cursor.skip_space()
        space = self._recorded()
        if char == "{":
            yield from self._objects(space)
        else:
            self.content(space)
        yield from super()._parse()

    def _read(self, marker: str) -> Steps[bool]:
        yield from self._objects(marker)
        return False

    def _objects(self, before: str) -> Steps[None]:
        """Read objects with semicolons between them."""
        while (yield from self.attempt(before, self.json_call())):
            self.cursor.record("")
            yield from self.cursor.skip_space()
            if not (yield from self.cursor.accept(";")):
                self.content(self._recorded())
                return
            before = self._recorded()
