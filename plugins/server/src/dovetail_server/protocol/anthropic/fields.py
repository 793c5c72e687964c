"""The fields of /v1/messages, and the chat completion that they describe."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct, structs

from dovetail_server.protocol.errors import APIError
from dovetail_server.protocol.fields import ChatRequest, FieldRules

Object = dict[str, Any]
_SYSTEM = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "object"}},
        {"type": "null"},
    ]
}
EFFORTS = ("low", "medium", "high", "xhigh", "max")
VERSIONS = ("2026-10-21", "2023-06-01", "2023-01-01")
VERSION_HEADER = "anthropic-version"


class Metadata(Struct, kw_only=True):
    """Information about a request. user_id: the tenant, for scheduling policies."""

    user_id: str | None = None


class CountRequest(Struct, kw_only=True):
    """The body of /v1/messages/count_tokens."""

    messages: list[dict[str, Any]]
    model: str | None = None
    system: Annotated[Any, Meta(extra_json_schema=_SYSTEM)] = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Object | None = None
    thinking: Object | None = None
    output_config: Object | None = None


class MessagesRequest(CountRequest, kw_only=True):
    """The body of /v1/messages."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None
    # Additional fields, which chat completions have, too.
    seed: int | None = None
    min_p: float | None = None
    priority: int | None = None
    cache_salt: str | None = None
    chat_template_kwargs: Object | None = None


RULES = FieldRules(
    unsupported={
        "container": (),
        "context_management": (),
        "diagnostics": (),
        "fallbacks": (),
        "inference_geo": (),
        "mcp_servers": ([],),
        "speed": ("standard",),
        "user_profile_id": (),
        "workspace_id": (),
    },
    without_effect=frozenset({"cache_control", "service_tier"}),
)
SAME = (
    "model",
    "max_tokens",
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "min_p",
    "priority",
    "cache_salt",
    "chat_template_kwargs",
)
NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_budget": "thinking.budget_tokens",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}
"""Fields of a chat completion that have a different name here."""


def chat_request(request: CountRequest, messages: list[Object], templates: str) -> ChatRequest:
    """Return the chat completion that a request describes. Raise APIError for an invalid field.

    templates: the text of the model's chat templates.
    """
    chat = ChatRequest(messages=messages, tools=_tools(request.tools))
    if isinstance(request, MessagesRequest):
        chat = structs.replace(
            chat,
            stop=request.stop_sequences,
            user=request.metadata.user_id if request.metadata else None,
            **{name: getattr(request, name) for name in SAME},
        )
    chat = _with_choice(chat, request.tool_choice)
    chat = _with_output(chat, request.output_config or {})
    return _with_thinking(chat, request.thinking, templates)


def returns_thinking(request: CountRequest) -> bool:
    """Return whether the response shows the reasoning."""
    thinking = request.thinking or {}
    return thinking.get("type", "disabled") != "disabled" and thinking.get("display") != "omitted"


def _tools(tools: list[Object] | None) -> list[Object] | None:
    if tools is None:
        return None
    converted = []
    for index, tool in enumerate(tools):
        if tool.get("type", "custom") not in ("custom", None):
            raise APIError(
                f"tools[{index}].type is {str(tool['type'])[:40]!r}; this server supports only "
                "tools with an input_schema.",
                code="unsupported_parameter",
                param=f"tools[{index}].type",
            )
        if type(tool.get("input_schema")) is not dict:
            raise APIError(
                f"tools[{index}].input_schema must be a JSON schema (an object).",
                code="invalid_type",
                param=f"tools[{index}].input_schema",
            )
        function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
        if tool.get("description") is not None:
            function["description"] = tool["description"]
        converted.append({"type": "function", "function": function})
    return converted


def _with_choice(chat: ChatRequest, choice: Object | None) -> ChatRequest:
    if choice is None:
        return chat
    kind, single = choice.get("type"), choice.get("disable_parallel_tool_use")
    converted: Any = {"auto": "auto", "any": "required", "none": "none"}.get(str(kind))
    if kind == "tool" and isinstance(choice.get("name"), str):
        converted = {"type": "function", "function": {"name": choice["name"]}}
    if converted is None or type(single) not in (bool, type(None)):
        raise APIError(
            'tool_choice must be {"type": "auto"}, {"type": "any"}, {"type": "none"} or {"type": '
            '"tool", "name": …}, with a boolean disable_parallel_tool_use.',
            param="tool_choice",
        )
    return structs.replace(
        chat, tool_choice=converted, parallel_tool_calls=False if single else None
    )


def _with_output(chat: ChatRequest, output: Object) -> ChatRequest:
    effort, form = output.get("effort"), output.get("format")
    if effort is not None and effort not in EFFORTS:
        raise APIError(
            f"output_config.effort must be one of: {', '.join(EFFORTS)}.",
            param="output_config.effort",
        )
    if form is None:
        return structs.replace(chat, reasoning_effort=effort)
    schema = form.get("schema") if isinstance(form, dict) else None
    if schema is None or form.get("type") != "json_schema" or not isinstance(schema, dict):
        raise APIError(
            'output_config.format must be {"type": "json_schema", "schema": {…}}.',
            param="output_config.format",
        )
    wrapper = {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}
    return structs.replace(chat, reasoning_effort=effort, response_format=wrapper)


def _with_thinking(chat: ChatRequest, thinking: Object | None, templates: str) -> ChatRequest:
    """Set whether the model reasons, if its chat template has the variable `enable_thinking`."""
    kind = "disabled" if thinking is None else thinking.get("type")
    budget = (thinking or {}).get("budget_tokens")
    if kind not in ("enabled", "disabled", "adaptive") or (kind == "enabled") != (
        type(budget) is int and budget > 0
    ):
        raise APIError(
            'thinking must be {"type": "enabled", "budget_tokens": …} with a positive integer, '
            '{"type": "adaptive"} or {"type": "disabled"}.',
            param="thinking",
        )
    if (thinking or {}).get("display") not in (None, "summarized", "omitted"):
        raise APIError(
            'thinking.display must be "summarized" or "omitted".', param="thinking.display"
        )
    if kind == "enabled":
        chat = structs.replace(chat, thinking_budget=budget)
    if "enable_thinking" not in templates:
        return chat
    variables = {"enable_thinking": kind != "disabled", **(chat.chat_template_kwargs or {})}
    return structs.replace(chat, chat_template_kwargs=variables)


def check_version(version: str | None) -> None:
    """Raise APIError for a version of the API that this server does not know."""
    if version is not None and version not in VERSIONS:
        raise APIError(
            f"The header {VERSION_HEADER} is {version[:40]!r}; use one of: {', '.join(VERSIONS)}.",
            param=VERSION_HEADER,
        )
