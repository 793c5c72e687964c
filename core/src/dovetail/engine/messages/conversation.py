"""Checks the roles and contents of a conversation's messages.

`LLM.chat` and the server use these checks, so both accept the same messages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any

from dovetail.errors import RequestError
from dovetail.value_checks import shorten

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""The roles of OpenAI's API. A chat template may name further roles."""
MAX_ROLE_CHARS = 64
_TEXT_PARTS = ("text", "input_text")


class FieldProblem(StrEnum):
    """The kind of an invalid field. The values are codes of OpenAI's API."""

    MISSING = "missing_required_parameter"
    TYPE = "invalid_type"
    VALUE = "invalid_value"
    UNSUPPORTED = "unsupported_parameter"


class MessageFieldError(RequestError):
    """A field of a message is invalid. problem: the kind of the problem."""

    def __init__(self, message: str, *, parameter: str, problem: FieldProblem) -> None:
        super().__init__(message, parameter=parameter)
        self.problem = problem


def read_messages(
    items: Sequence[Mapping[str, Any]], templates: Iterable[str] = (), *, name: str = "messages"
) -> list[dict[str, Any]]:
    """Return messages whose content is a string, or None for a message with tool calls.

    The texts of a content of several parts are joined. templates: the chat templates, which may
    name further roles. name: the name of the conversation in errors. Raises MessageFieldError,
    naming the field such as "messages[0].role".
    """
    messages = [_read_message(f"{name}[{index}]", item) for index, item in enumerate(items)]
    known: Collection[str] = ROLES
    for index, message in enumerate(messages):
        role = message["role"]
        if role not in known and known is ROLES:
            known = {*ROLES, *_named_roles(templates)}
        if role not in known:
            # A typo, or injected text.
            choices = f"use one of: {', '.join(ROLES)}, or a role that the chat template names."
            problem = f"is {shorten(role[:40])}; {choices}"
            raise _invalid(f"{name}[{index}].role", problem, FieldProblem.VALUE)
    return messages


def _read_message(name: str, message: Mapping[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    if type(role) is not str or not role:
        problem = FieldProblem.MISSING if role is None else FieldProblem.TYPE
        raise _invalid(f"{name}.role", "must be a string, such as user.", problem)
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(
            _read_part(f"{name}.content[{index}]", part) for index, part in enumerate(content)
        )
    elif content is None and not message.get("tool_calls"):
        raise _invalid(f"{name}.content", "is missing.", FieldProblem.MISSING)
    elif not isinstance(content, str | None):
        expected = "must be a string or a list of parts."
        raise _invalid(f"{name}.content", expected, FieldProblem.TYPE)
    return {**message, "content": content}


def _named_roles(templates: Iterable[str]) -> set[str]:
    """Return the texts in quotes of all templates, read once: a search per message is too slow."""
    return {
        text
        for template in templates
        for quote in ("'", '"')
        for text in template.split(quote)[1:-1]
        if len(text) <= MAX_ROLE_CHARS
    }


def _read_part(name: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("text") if isinstance(part, dict) else None
    if kind in _TEXT_PARTS and isinstance(text, str):
        return text
    if isinstance(kind, str) and kind not in _TEXT_PARTS:
        only_text = f"is {shorten(kind[:40])}; this model accepts only text."
        raise _invalid(f"{name}.type", only_text, FieldProblem.UNSUPPORTED)
    raise _invalid(name, 'must be {"type": "text", "text": "…"}.', FieldProblem.TYPE)


def _invalid(parameter: str, text: str, problem: FieldProblem) -> MessageFieldError:
    return MessageFieldError(f"{parameter} {text}", parameter=parameter, problem=problem)
