"""Checks the tools of a request, and constrains the calls of the model with a grammar.

A call that is required or named is always constrained to the tool's schema. A call that the model
begins by itself is constrained from its first marker on, if the format has such a marker.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dovetail.errors import RequestError
from dovetail.interfaces import CallText, ReasoningMarkers, ToolParser
from dovetail.sampling_params import ReasoningParams, SamplingParams, StructuredOutputsParams
from dovetail.value_checks import invalid, shorten

MAX_TOOLS = 128
"""Maximum number of tools of a request."""
MAX_DESCRIPTION_CHARS = 65536
CHOICES = ("auto", "none", "required")
"""The values of `tool_choice` besides the name of a function."""

_OBJECT_KEYWORDS = frozenset(
    {"properties", "$ref", "anyOf", "oneOf", "allOf", "additionalProperties"}
)
"""A schema of parameters must have `type` or one of these keywords."""

_GRAMMAR_FIELD = "structured_outputs"
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, kw_only=True)
class ToolUse:
    """How a request uses tools.

    tools: checked definitions in OpenAI's form. choice: one of `CHOICES`, or "named". name: the
    named function. parallel: whether a message may have several calls.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    choice: str = "none"
    name: str = ""
    parallel: bool = True

    @property
    def shown(self) -> tuple[Mapping[str, Any], ...]:
        """The tools that the prompt describes."""
        return () if self.choice == "none" else self.tools

    @property
    def is_forced(self) -> bool:
        """Whether the model must call a function."""
        return self.choice in ("required", "named")

    @property
    def offered(self) -> tuple[Mapping[str, Any], ...]:
        """The tools that the model may call."""
        if self.choice == "none":
            return ()
        if self.choice == "named":
            return tuple(tool for tool in self.tools if _name_of(tool) == self.name)
        return self.tools


def read_tools(
    tools: object, tool_choice: object = None, parallel_tool_calls: object = None
) -> ToolUse:
    """Return the checked tools of a request. Raise RequestError that names the field.

    tools: None, or a list of {"type": "function", "function": {…}}. tool_choice: None for "auto" if
    there are tools, one of `CHOICES`, or {"type": "function", "function": {"name": …}}.
    """
    if parallel_tool_calls not in (None, True, False):
        raise invalid("parallel_tool_calls", parallel_tool_calls, "True or False")
    checked = _read_definitions(tools)
    choice, name = _read_choice(tool_choice, has_tools=bool(checked))
    names = [_name_of(item) for item in checked]
    if choice == "named" and name not in names:
        raise RequestError(
            f"tool_choice names the function {shorten(name)}, which is not in tools.",
            parameter="tool_choice",
        )
    if choice in ("required", "named") and not checked:
        raise RequestError(f"tool_choice={choice!r} needs tools.", parameter="tool_choice")
    return ToolUse(
        tools=checked, choice=choice, name=name, parallel=parallel_tool_calls is not False
    )


def constrain(
    params: SamplingParams,
    use: ToolUse,
    *,
    parser_cls: type[ToolParser] | None,
    markers: ReasoningMarkers | None,
    has_grammar: bool,
    thinking_budget: int | None = None,
) -> SamplingParams:
    """Return sampling parameters that constrain the calls, the answer and the reasoning.

    parser_cls: the parser of the model's format. markers: the reasoning markers, or None.
    has_grammar: whether the engine has a grammar plugin. thinking_budget: maximum number of
    reasoning tokens, or None. Raises RequestError, naming the field, if the engine does not support
    the request.
    """
    changes: dict[str, Any] = {}
    grammar = _grammar_of(params, use, parser_cls, markers, has_grammar=has_grammar)
    if grammar is not None:
        changes["structured_outputs"] = _tag(grammar, "tools" if use.offered else _GRAMMAR_FIELD)
    if thinking_budget is not None and markers is None:
        raise RequestError(
            "thinking_budget requires a reasoning model: no reasoning parser matches the chat "
            "template. Set reasoning_parser when you start the engine.",
            parameter="thinking_budget",
        )
    is_masked = params.structured_outputs is not None or grammar is not None
    is_limited = is_masked or thinking_budget is not None
    if is_limited and markers is not None and params.reasoning is None:
        changes["reasoning"] = ReasoningParams(
            end=markers.end, start=markers.start, budget=thinking_budget
        )
    return replace(params, **changes) if changes else params


def _grammar_of(
    params: SamplingParams,
    use: ToolUse,
    parser_cls: type[ToolParser] | None,
    markers: ReasoningMarkers | None,
    *,
    has_grammar: bool,
) -> dict[str, Any] | None:
    """Return the structural tag of a request, or None to use the grammar of `params`."""
    response_grammar = params.structured_outputs
    if not use.offered:
        if response_grammar is None or markers is None or not markers.answer:
            return None
        structure = {"begin": markers.answer, **_value(response_grammar)}
        return {"structures": [structure], "at_least_one": True}
    if parser_cls is None:
        raise RequestError(
            "tools needs a tool parser, but the chat template has no known format. Set "
            "tool_parser when you start the engine.",
            parameter="tools",
        )
    calls = _call_grammar(use, parser_cls, response_grammar, markers)
    if use.is_forced and not has_grammar:
        raise RequestError(
            f"tool_choice={use.choice!r} needs a grammar plugin; set grammar_backend when you "
            "start the engine.",
            parameter="tool_choice",
        )
    can_end = use.is_forced or not params.ignore_eos or bool(params.stop_token_ids)
    return calls if has_grammar and can_end else None


def _call_grammar(
    use: ToolUse,
    parser_cls: type[ToolParser],
    response_grammar: StructuredOutputsParams | None,
    markers: ReasoningMarkers | None,
) -> dict[str, Any] | None:
    """Return the structural tag of the calls, or None if they are not constrained."""
    texts = [(item, parser_cls.call_text(_name_of(item))) for item in use.offered]
    formatted = [(item, text) for item, text in texts if text is not None]
    if not formatted:
        if use.is_forced:
            raise RequestError(
                f"tool_choice={use.choice!r} is not supported by the tool parser "
                f"{parser_cls.__name__}, which cannot constrain calls.",
                parameter="tool_choice",
            )
        return None
    structures = [_structure(item, text) for item, text in formatted]
    separator = formatted[0][1].separator
    several = use.parallel and separator is not None and use.choice != "named"
    if use.is_forced or response_grammar is not None:
        if response_grammar is not None and not use.is_forced:
            begin = markers.answer if markers is not None else ""
            structures.append({"begin": begin, **_value(response_grammar)})
            several = False
        extra = {"separator": separator} if several else {"stop_after_first": True}
        return {"structures": structures, "at_least_one": True, **extra}
    triggers = sorted({text.trigger for _, text in formatted})
    if not all(triggers):
        return None
    return {
        "structures": structures,
        "triggers": triggers,
        "stop_after_first": not use.parallel,
    }


def _structure(tool: Mapping[str, Any], text: CallText) -> dict[str, Any]:
    schema = dict(tool["function"].get("parameters") or {})
    schema.setdefault("type", "object")
    return {"begin": text.begin, "schema": schema, "end": text.end}


def _tag(grammar: dict[str, Any], field: str) -> StructuredOutputsParams:
    """Return a structural tag as parameters. field: the field of the request, for errors."""
    try:
        return StructuredOutputsParams(structural_tag=grammar)
    except RequestError as error:
        raise RequestError(
            f"the grammar of {field} cannot be used: {error}", parameter=field
        ) from None


def _value(response_grammar: StructuredOutputsParams) -> dict[str, Any]:
    """Return the part of a structural tag that describes the grammar of an output."""
    form, text = response_grammar.form, response_grammar.text
    if form == "json_object":
        return {"schema": {"type": "object"}}
    if form in ("regex", "grammar"):
        return {form: text}
    value = _parsed(text) if form in ("json_schema", "choice") else None
    if form == "json_schema" and isinstance(value, dict):
        return {"schema": value}
    if form == "choice" and isinstance(value, list) and all(isinstance(x, str) for x in value):
        return {"regex": "|".join(map(_escaped, value))}
    raise RequestError(
        f"the form {form} of structured_outputs, with this value, cannot be combined with tools or "
        "reasoning.",
        parameter=_GRAMMAR_FIELD,
    )


def _parsed(text: str) -> Any:
    """Return the JSON value of a user's text. Raise RequestError if it is not valid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # also for an integer of 5,000 digits
        raise RequestError(
            f"structured_outputs is not valid JSON: {shorten(str(error))[1:-1]}.",
            parameter=_GRAMMAR_FIELD,
        ) from None


def _escaped(text: str) -> str:
    return re.sub(r"([\\^$.|?*+()\[\]{}/])", r"\\\1", text)


def _read_definitions(tools: object) -> tuple[Mapping[str, Any], ...]:
    if tools is None:
        return ()
    if not isinstance(tools, Sequence) or isinstance(tools, (str, bytes)):
        raise invalid("tools", tools, "a list of tools")
    if len(tools) > MAX_TOOLS:
        raise RequestError(
            f"tools has {len(tools)} entries; at most {MAX_TOOLS} are accepted.", parameter="tools"
        )
    checked = tuple(_read_definition(f"tools[{index}]", tool) for index, tool in enumerate(tools))
    names: set[str] = set()
    for index, item in enumerate(checked):
        name = _name_of(item)
        if name in names:
            raise RequestError(
                f"tools[{index}].function.name={name!r} occurs twice.",
                parameter=f"tools[{index}].function.name",
            )
        names.add(name)
    return checked


def _read_definition(where: str, definition: object) -> Mapping[str, Any]:
    if not isinstance(definition, Mapping) or definition.get("type") != "function":
        raise RequestError(
            f'{where} must be {{"type": "function", "function": {{"name": …}}}}.', parameter=where
        )
    function = definition.get("function")
    if not isinstance(function, Mapping):
        raise invalid(f"{where}.function", function, "an object with a name")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise invalid(
            f"{where}.function.name",
            name,
            "1 to 64 letters, digits, underscores, hyphens or periods",
        )
    description = function.get("description")
    if description is not None and (
        not isinstance(description, str) or len(description) > MAX_DESCRIPTION_CHARS
    ):
        raise invalid(
            f"{where}.function.description",
            description,
            f"a string of at most {MAX_DESCRIPTION_CHARS} characters",
        )
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise invalid(f"{where}.function.parameters", parameters, "a JSON schema (an object)")
    has_type = "type" in (parameters or {}) or (parameters or {}).keys() & _OBJECT_KEYWORDS
    if parameters and (not has_type or parameters.get("type", "object") != "object"):
        raise invalid(f"{where}.function.parameters.type", parameters.get("type"), '"object"')
    return definition


def _read_choice(choice: object, *, has_tools: bool) -> tuple[str, str]:
    """Return the kind of choice, and the name of the function."""
    if choice is None:
        return ("auto" if has_tools else "none"), ""
    if isinstance(choice, str) and choice in CHOICES:
        return (choice if has_tools or choice == "required" else "none"), ""
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if isinstance(choice, Mapping) and choice.get("type") == "function" and isinstance(name, str):
        return "named", name
    raise invalid(
        "tool_choice",
        choice,
        f'{", ".join(CHOICES)}, or {{"type": "function", "function": {{"name": …}}}}',
    )


def _name_of(tool: Mapping[str, Any]) -> str:
    name: str = tool["function"]["name"]
    return name
