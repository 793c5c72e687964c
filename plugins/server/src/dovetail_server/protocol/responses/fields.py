"""The fields of /v1/responses, and the chat completion that they describe."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct, structs

from dovetail_server.protocol.errors import APIError
from dovetail_server.protocol.fields import ChatRequest, FieldRules

_INPUT = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}
_TOOL_CHOICE = {"anyOf": [{"type": "string"}, {"type": "object"}, {"type": "null"}]}

MAX_METADATA, MAX_KEY_CHARS, MAX_VALUE_CHARS = 16, 64, 512
LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


class Reasoning(Struct, kw_only=True):
    """Options of the model's reasoning.

    summary: "auto" or "detailed" return the reasoning as a summary.
    """

    effort: str | None = None
    summary: str | None = None


class TextOptions(Struct, kw_only=True):
    """The format of the output."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesStreamOptions(Struct, kw_only=True):
    """Options of a streamed response."""

    include_obfuscation: bool | None = None


class ResponsesRequest(Struct, kw_only=True):
    """The body of /v1/responses."""

    input: Annotated[Any, Meta(extra_json_schema=_INPUT)]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Annotated[Any, Meta(extra_json_schema=_TOOL_CHOICE)] = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    truncation: str | None = None
    user: str | None = None
    # Additional fields, which chat completions have, too.
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_budget: int | None = None


RULES = FieldRules(
    unsupported={
        "access_programs": (),
        "background": (False,),
        "background_options": (),
        "context_management": (),
        "conversation": (),
        "image": (),
        "max_tool_calls": (),
        "moderation": (),
        "prompt": (),
    },
    without_effect=frozenset(
        {
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "service_tier",
        }
    ),
)

SAME = (
    "model",
    "stream",
    "temperature",
    "top_p",
    "top_logprobs",
    "parallel_tool_calls",
    "user",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "min_tokens",
    "ignore_eos",
    "priority",
    "cache_salt",
    "chat_template_kwargs",
    "thinking_budget",
)
"""Fields that a chat completion has under the same name."""

NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "include",
}
"""Fields of a chat completion that have a different name here."""


def check_fields(request: ResponsesRequest) -> None:
    """Raise APIError for a field that the type does not check."""
    _check_choice("truncation", request.truncation, ("auto", "disabled"))
    reasoning, text = request.reasoning or Reasoning(), request.text or TextOptions()
    _check_choice("reasoning.effort", reasoning.effort, EFFORTS)
    _check_choice("reasoning.summary", reasoning.summary, ("auto", "detailed"))
    _check_choice("text.verbosity", text.verbosity, ("medium",))
    for name in request.include or ():
        _check_choice("include", name, (LOGPROBS, ENCRYPTED))
    if request.top_logprobs and LOGPROBS not in (request.include or ()):
        raise APIError(
            f'top_logprobs needs "{LOGPROBS}" in include.',
            code="contradictory_parameters",
            param="top_logprobs",
        )
    check_metadata(request.metadata)


def check_metadata(metadata: dict[str, str] | None) -> None:
    """Raise APIError for metadata above the limits of the API."""
    pairs = (metadata or {}).items()
    if len(pairs) > MAX_METADATA or any(
        len(key) > MAX_KEY_CHARS or len(value) > MAX_VALUE_CHARS for key, value in pairs
    ):
        raise APIError(
            f"metadata may have at most {MAX_METADATA} entries, with keys of up to "
            f"{MAX_KEY_CHARS} and values of up to "
            f"{MAX_VALUE_CHARS} characters.",
            param="metadata",
        )


def chat_request(request: ResponsesRequest, messages: list[dict[str, Any]]) -> ChatRequest:
    """Return the chat completion that a request describes. Raise APIError for an invalid field."""
    reasoning, text = request.reasoning or Reasoning(), request.text or TextOptions()
    tools, choice = _tools(request.tools), request.tool_choice
    if isinstance(choice, dict):
        tools, choice = _narrowed(tools, choice)
    chat = ChatRequest(
        messages=messages,
        max_completion_tokens=request.max_output_tokens,
        tools=tools,
        tool_choice=choice,
        response_format=None if text.format is None else _format(text.format),
        logprobs=LOGPROBS in (request.include or ()) or None,
        **{name: getattr(request, name) for name in SAME},
    )
    if reasoning.effort == "none":
        kwargs = {"enable_thinking": False, **(chat.chat_template_kwargs or {})}
        return structs.replace(chat, chat_template_kwargs=kwargs)
    return structs.replace(chat, reasoning_effort=reasoning.effort)


def _check_choice(name: str, value: str | None, choices: tuple[str, ...]) -> None:
    if value is not None and value not in choices:
        raise APIError(
            f"{name} is {value[:80]!r}; this server supports: {', '.join(choices)}.",
            code="unsupported_parameter",
            param=name,
        )


def _tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Return tools in the format of a chat completion. Raise APIError for another kind of tool."""
    if tools is None:
        return None
    converted = []
    for index, tool in enumerate(tools):
        if tool.get("type") != "function":
            raise APIError(
                f"tools[{index}].type is {str(tool.get('type'))[:40]!r}; this server supports only "
                "function.",
                code="unsupported_parameter",
                param=f"tools[{index}].type",
            )
        names = ("name", "description", "parameters", "strict")
        own = {name: tool[name] for name in names if tool.get(name) is not None}
        converted.append({"type": "function", "function": own})
    return converted


def _narrowed(
    tools: list[dict[str, Any]] | None, choice: dict[str, Any]
) -> tuple[list[dict[str, Any]] | None, Any]:
    """Return the tools and the `tool_choice` of a chat completion for an object."""
    kind = choice.get("type")
    if kind == "function":
        return tools, {"type": "function", "function": {"name": choice.get("name")}}
    entries, mode = choice.get("tools"), choice.get("mode")
    if kind != "allowed_tools" or mode not in ("auto", "required") or type(entries) is not list:
        raise APIError(
            'tool_choice must be "none", "auto", "required", {"type": "function", "name": …} or '
            '{"type": "allowed_tools", "mode": …, "tools": […]}.',
            param="tool_choice",
        )
    names = {str(item.get("name")) for item in entries if isinstance(item, dict)}
    allowed = [tool for tool in tools or () if tool["function"].get("name") in names]
    if not allowed or len(allowed) != len(entries):
        raise APIError("tool_choice.tools must name entries of tools.", param="tool_choice")
    return allowed, mode


def _format(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the `response_format` of a chat completion."""
    kind = fields.get("type")
    if kind in ("text", "json_object"):
        return {"type": kind}
    if kind != "json_schema" or not isinstance(fields.get("schema"), dict):
        raise APIError(
            'text.format must be {"type": "text"}, {"type": "json_object"} or {"type": '
            '"json_schema", "name": …, "schema": {…}}.',
            param="text.format",
        )
    return {"type": "json_schema", "json_schema": fields}
