"""The fields of generation requests, with their types, and the fields that are not supported.

msgspec checks the types and `SamplingParams` the ranges. The OpenAPI document is derived from the
same classes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

from dovetail.errors import nearest
from dovetail_server.protocol.errors import APIError

R = TypeVar("R", bound=Struct)

TokenIds = list[int]
PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "integer"}},
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
    ]
}
_STOP = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        {"type": "null"},
    ]
}


_JSON_SCHEMA = {"anyOf": [{"type": "object"}, {"type": "string"}, {"type": "null"}]}


_TOOL_CHOICE = {"anyOf": [{"type": "string"}, {"type": "object"}, {"type": "null"}]}


class StreamOptions(Struct, kw_only=True):
    """Options of a streamed response."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SharedFields(Struct, kw_only=True):
    """The fields that generation and pooling requests share."""

    model: str | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    user: str | None = None
    cache_salt: str | None = None


class GenerationFields(SharedFields, kw_only=True):
    """The fields that completions and chat completions share."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    best_of: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: Annotated[Any, Meta(extra_json_schema=_STOP)] = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Annotated[Any, Meta(extra_json_schema=_JSON_SCHEMA)] = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None


class CompletionRequest(GenerationFields, kw_only=True):
    """The body of /v1/completions."""

    prompt: Annotated[Any, Meta(extra_json_schema=PROMPT_SCHEMA)]
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None


class ChatRequest(GenerationFields, kw_only=True):
    """The body of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Annotated[Any, Meta(extra_json_schema=_TOOL_CHOICE)] = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    thinking_budget: int | None = None


UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "beam_width": (),
    "documents": ([],),
    "echo": (False,),
    "frequency_penalties": (),
    "function_call": ("none",),
    "functions": ([],),
    "length_penalty": (1.0, 1),
    "lora_request": (),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_embeds": (),
    "reasoning_effort": (),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Fields of other servers that this server does not support, and the values that have no effect."""

WITHOUT_EFFECT = frozenset(
    {
        "guided_decoding_backend",
        "guided_whitespace_pattern",
        "metadata",
        "prompt_cache_key",
        "safety_identifier",
        "service_tier",
    }
)
"""Accepted fields without effect, such as information for the provider of a service."""


MAX_FIELDS = 1024
"""Maximum number of fields of a request, including unknown fields."""

_TYPE_NAMES = {
    "array": "a list",
    "bool": "a boolean",
    "float": "a number",
    "int": "an integer",
    "null": "null",
    "object": "an object",
    "str": "a string",
}


@dataclass(frozen=True, kw_only=True)
class FieldRules:
    """An API's rules for fields that its request classes do not have.

    unsupported: see `UNSUPPORTED`. without_effect: see `WITHOUT_EFFECT`.
    """

    unsupported: Mapping[str, tuple[Any, ...]]
    without_effect: Collection[str]


CHAT_RULES = FieldRules(unsupported=UNSUPPORTED, without_effect=WITHOUT_EFFECT)


def read_fields(
    values: dict[str, Any], kind: type[R], *, strict: bool, rules: FieldRules = CHAT_RULES
) -> tuple[R, list[str]]:
    """Return the request in `values`, and the names of the unknown fields.

    strict: reject unknown fields. Raises an APIError that names an invalid or missing field.
    """
    if len(values) > MAX_FIELDS:
        raise APIError(f"The body has {len(values)} fields; at most {MAX_FIELDS} are accepted.")
    known = kind.__struct_fields__
    ignored = []
    for name in values.keys() - known:
        if name in rules.unsupported:
            _check_unsupported(name, values[name], rules.unsupported[name])
        elif name not in rules.without_effect:
            ignored.append(name)
    ignored.sort()
    if ignored and strict:
        name = ignored[0]
        raise APIError(
            f"The field {name[:80]!r} is not known.{nearest(name, known)}",
            code="unknown_parameter",
            param=name[:80],
        )
    try:
        return msgspec.convert(values, kind), ignored
    except (msgspec.ValidationError, RecursionError) as error:
        raise _type_error(str(error), kind) from None


def _check_unsupported(name: str, value: object, allowed: tuple[Any, ...]) -> None:
    if value is None or any(type(value) is type(item) and value == item for item in allowed):
        return
    raise APIError(
        f"{name} is not supported by this server; omit it.",
        code="unsupported_parameter",
        param=name,
    )


def _choices(kind: type[Struct], name: str | None) -> list[str]:
    """Return the values that a field accepts if it is a choice of strings."""
    types = [item.type for item in msgspec.structs.fields(kind) if item.encode_name == name]
    return [
        str(value)
        for member in types + [item for whole in types for item in get_args(whole)]
        if get_origin(member) is Literal
        for value in get_args(member)
    ]


def _type_error(message: str, kind: type[Struct]) -> APIError:
    """Return the error for a message of msgspec, such as "Expected `int`, got `str` - at `$.n`".

    kind: the class of the request.
    """
    reason, _, location = message.partition(" - at `")
    path = location.rstrip("`").removeprefix("$").removeprefix(".") or None
    if reason.startswith("Object missing required field"):
        name = reason.partition("`")[2].rstrip("`")
        full = f"{path}.{name}" if path else name
        return APIError(
            f"The field {full} is missing.", code="missing_required_parameter", param=full
        )
    expected = re.fullmatch(r"Expected `(.+)`, got `(.+)`", reason)
    subject = f"The field {path}" if path else "The body"
    if choices := _choices(kind, path):
        return APIError(
            f"{subject} must be one of: {', '.join(choices)}.", code="invalid_type", param=path
        )
    if expected is None:
        return APIError(f"{subject} is invalid: {reason}.", code="invalid_type", param=path)
    type_names = " or ".join(_TYPE_NAMES.get(item, item) for item in expected[1].split(" | "))
    actual = _TYPE_NAMES.get(expected[2], expected[2])
    return APIError(
        f"{subject} must be {type_names}, not {actual}.", code="invalid_type", param=path
    )
