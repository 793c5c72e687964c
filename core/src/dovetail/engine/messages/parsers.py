"""Chooses the parser plugins of a front end, and parses the text of a completion with them.

A parser plugin is named by an option or chosen by the model's chat template. The reasoning parser
reads the text first; the tool parser reads the content that it leaves.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dovetail.engine.plugin_choices import named_plugins
from dovetail.errors import PluginError
from dovetail.interfaces import (
    ReasoningMarkers,
    ReasoningParser,
    ReasoningParserContext,
    Tokenizer,
    ToolCallDelta,
    ToolParser,
    ToolParserContext,
)
from dovetail.outputs import ChatMessage, ToolCall
from dovetail.plugin_kinds import NO_PLUGIN, get_kind
from dovetail.plugins import PluginRegistry

if TYPE_CHECKING:
    from dovetail.engine.plugin_choices import AnyConfig

logger = logging.getLogger(__name__)

MAX_PROMPT_END_CHARS = 4096
"""A reasoning parser receives at most this many characters from the end of the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageDelta:
    """The new parts of a message."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCallDelta, ...] = ()


class MessageParser:
    """Parses the text of one completion. A parser plugin that fails is not used any further."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    def feed(self, text: str) -> MessageDelta:
        """Process the next piece of text and return what can be classified so far."""
        return self._read(text, is_last=False)

    def finish(self, text: str = "") -> MessageDelta:
        """Process the last piece of text and return the rest of the message."""
        return self._read(text, is_last=True)

    def _read(self, text: str, *, is_last: bool) -> MessageDelta:
        reasoning, content, calls = "", text, []
        if self._reasoning is not None:
            try:
                deltas = [self._reasoning.feed(text)] if text else []
                deltas += [self._reasoning.finish()] if is_last else []
                reasoning = "".join(delta.reasoning for delta in deltas)
                content = "".join(delta.content for delta in deltas)
            except Exception:
                logger.exception("The reasoning parser failed; the rest of the text is content.")
                self._reasoning = None
        if self._tools is not None:
            try:
                tool_deltas = [self._tools.feed(content)] if content else []
                tool_deltas += [self._tools.finish()] if is_last else []
                content = "".join(item.content for item in tool_deltas)
                calls = [call for item in tool_deltas for call in item.calls]
            except Exception:
                logger.exception("The tool parser failed; the rest of the text is content.")
                self._tools = None
        return MessageDelta(content=content, reasoning=reasoning, calls=tuple(calls))


@dataclass(frozen=True, kw_only=True)
class ChosenParser:
    """A parser plugin with its name, the reason for the choice, and the user's options."""

    cls: type[Any]
    name: str
    why: str
    options: Mapping[str, object]


@dataclass(frozen=True, kw_only=True)
class MessageParsers:
    """The parser plugins of a front end, or None for a kind without a plugin."""

    tokenizer: Tokenizer | None
    tools: ChosenParser | None
    reasoning: ChosenParser | None

    @classmethod
    def of(
        cls, config: AnyConfig, plugins: PluginRegistry, tokenizer: Tokenizer | None
    ) -> MessageParsers:
        """Choose the parsers. Raise a PluginError if a parser named by an option cannot load."""
        return cls(
            tokenizer=tokenizer,
            tools=choose_parser("tool_parser", config, plugins, tokenizer),
            reasoning=choose_parser("reasoning_parser", config, plugins, tokenizer),
        )

    @property
    def tool_parser_cls(self) -> type[ToolParser] | None:
        """The class of the tool parser, or None."""
        return None if self.tools is None else self.tools.cls

    def markers(self, prompt_end: str) -> ReasoningMarkers | None:
        """Return the markers of the reasoning that follows a prompt, or None without reasoning."""
        parser = self._reasoning_parser(prompt_end)
        return None if parser is None else parser.markers()

    def make(self, tools: Sequence[Mapping[str, Any]], prompt_end: str) -> MessageParser | None:
        """Return the parser of a completion, or None if its text needs no parser.

        tools: the tools that the model may call. prompt_end: the end of the prompt's text.
        """
        reasoning, reader = self._reasoning_parser(prompt_end), None
        if tools and self.tools is not None and self.tokenizer is not None:
            reader = self.tools.cls(
                ToolParserContext(tokenizer=self.tokenizer, tools=tools, options=self.tools.options)
            )
        if reasoning is None and reader is None:
            return None
        return MessageParser(reasoning, reader)

    def _reasoning_parser(self, prompt_end: str) -> ReasoningParser | None:
        if self.reasoning is None or self.tokenizer is None:
            return None
        context = ReasoningParserContext(
            tokenizer=self.tokenizer,
            prompt_end=prompt_end[-MAX_PROMPT_END_CHARS:],
            options=self.reasoning.options,
        )
        instance: ReasoningParser = self.reasoning.cls(context)
        return instance


def parse_message(
    parser: MessageParser, text: str, parser_cls: type[ToolParser] | None
) -> ChatMessage:
    """Return the message of a complete text. parser_cls: creates the ids of the calls."""
    delta = parser.finish(text)
    new_id = (parser_cls or ToolParser).new_call_id
    arguments: dict[int, str] = {}
    for call in delta.calls:
        arguments[call.index] = arguments.get(call.index, "") + call.arguments
    calls = tuple(
        ToolCall(id=new_id(), name=call.name, arguments=arguments[call.index])
        for call in delta.calls
        if call.name is not None
    )
    return ChatMessage(
        content=delta.content or None if calls or delta.reasoning else delta.content,
        reasoning=delta.reasoning or None,
        tool_calls=calls,
    )


def choose_parser(
    kind: str, config: AnyConfig, plugins: PluginRegistry, tokenizer: Tokenizer | None
) -> ChosenParser | None:
    """Return the parser plugin that the option of `kind` names, or that matches the template."""
    option = get_kind(kind).option
    if getattr(config.extensions, option) == NO_PLUGIN or tokenizer is None:
        return None
    for reference in named_plugins(kind, config):
        cls = plugins.load(kind, reference)
        name = plugins.resolve(kind, reference).name
        return _chosen(plugins, kind, cls, name, f"{option} names it")
    template = template_of(tokenizer, with_tools=kind == "tool_parser")
    selection = _by_template(kind, plugins, template) if template else None
    plugins.note_choice(kind, None if selection is None else selection[1])
    if selection is None:
        return None
    name, cls = selection
    marks = ", ".join(cls.template_marks)
    return _chosen(plugins, kind, cls, name, f"the chat template contains {marks}")


def template_of(tokenizer: Tokenizer, *, with_tools: bool) -> str:
    """Return the chat template of a model, or "" if it has none."""
    own = tokenizer.chat_templates
    return (own.get("tool_use", "") if with_tools else "") or own.get("default", "")


def _chosen(
    plugins: PluginRegistry, kind: str, cls: type[Any], name: str, why: str
) -> ChosenParser:
    return ChosenParser(cls=cls, name=name, why=why, options=plugins.options_of(kind, cls))


def _by_template(
    kind: str, plugins: PluginRegistry, template: str
) -> tuple[str, type[ToolParser | ReasoningParser]] | None:
    """Return the name and class of the parser whose markers cover most of the template."""
    best: tuple[int, str, type[ToolParser | ReasoningParser]] | None = None
    for candidate in plugins.automatic(kind):
        try:
            cls = plugins.load(kind, candidate.reference)
        except PluginError as error:
            if plugins.policy.strict:
                raise
            plugins.put_aside(f"{kind} {candidate.reference}", error)
            continue
        marks = cls.template_marks
        size = sum(map(len, marks))
        if marks and all(mark in template for mark in marks) and (best is None or size > best[0]):
            best = size, candidate.name, cls
    return None if best is None else best[1:]
