"""Checks the tool calls and tool results in a conversation, and prepares them for a template.

Chat templates differ in the form of a call that they expect: its arguments as an object or as a
string, and the empty content of its message as "" or None. The form is found with a trial
conversation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from dovetail.errors import RequestError
from dovetail.interfaces import Tokenizer
from dovetail.value_checks import invalid, shorten

MAX_CALLS = 256
"""Maximum number of tool calls in a message."""


@dataclass(frozen=True, kw_only=True)
class CallForm:
    """The form of tool calls that a chat template expects.

    with_objects: whether arguments are objects instead of strings. content: the content of a
    message that has only calls.
    """

    with_objects: bool = True
    content: str | None = ""


FORMS = (
    CallForm(),
    CallForm(content=None),
    CallForm(with_objects=False, content=None),
    CallForm(with_objects=False),
)
"""All forms; of several that a template renders equally well, the first one is used."""

_TRIAL_NAME, _TRIAL_VALUE = "trial_name", "trial_value"
_TRIAL_TOOL = {"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}
_TRIAL = (
    {"role": "user", "content": "question"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "trialcall",
                "type": "function",
                "function": {"name": _TRIAL_NAME, "arguments": {"key": _TRIAL_VALUE}},
            }
        ],
    },
    {"role": "tool", "name": _TRIAL_NAME, "tool_call_id": "trialcall", "content": "result"},
)


_MAX_TEMPLATES = 32
_known_forms: WeakKeyDictionary[Tokenizer, dict[str | None, CallForm]] = WeakKeyDictionary()
"""The results of `call_form`. A tokenizer can be freed, which may need 100 MB."""


def call_form(tokenizer: Tokenizer, chat_template: str | None) -> CallForm:
    """Return the form of tool calls that a template expects. chat_template: None for the model's.

    Returns the first form if the template renders no form correctly. Thread-safe.
    """
    known = _known_forms.setdefault(tokenizer, {})
    form = known.get(chat_template)
    if form is None:
        scores = [_score(tokenizer, chat_template, form) for form in FORMS]
        form = FORMS[scores.index(max(scores))]
        if len(known) >= _MAX_TEMPLATES:
            known.clear()
        known[chat_template] = form
    return form


def _score(tokenizer: Tokenizer, chat_template: str | None, form: CallForm) -> int:
    """Return how well a template renders the trial: 2 with JSON arguments, 0 without the call."""
    try:
        text = tokenizer.apply_chat_template(
            prepare_history(_TRIAL, form), chat_template=chat_template, tools=[_TRIAL_TOOL]
        )
    except RequestError:
        return 0
    compact = text.replace(": ", ":")
    if _TRIAL_NAME in text and f'{{"key":"{_TRIAL_VALUE}"}}' in compact:
        return 2
    wrong = (f'\\"{_TRIAL_VALUE}', f"'{_TRIAL_VALUE}'")  # encoded twice, or Python's syntax
    has_call = _TRIAL_NAME in text and _TRIAL_VALUE in text
    return int(has_call and not any(item in text for item in wrong))


def has_calls(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a message has tool calls."""
    return any(message.get("tool_calls") for message in messages)


def prepare_history(
    messages: Sequence[Mapping[str, Any]], form: CallForm = FORMS[0], *, name: str = "messages"
) -> list[dict[str, Any]]:
    """Return the messages with calls in the form that the template expects.

    Arguments that are not a JSON object stay strings. name: the name of the conversation in errors.
    Raises RequestError, naming the field, for an invalid call, and for a result whose id is not
    that of an earlier call.
    """
    known: set[str] = set()
    prepared = []
    for index, message in enumerate(messages):
        where = f"{name}[{index}]"
        if message.get("role") == "tool":
            _check_result(where, message, known)
        calls = message.get("tool_calls")
        if calls:
            calls = _read_calls(f"{where}.tool_calls", calls, with_objects=form.with_objects)
            known.update(call["id"] for call in calls if "id" in call)
            content = message.get("content") or form.content
            message = {**message, "tool_calls": calls, "content": content}
        elif "tool_calls" in message:
            message = {key: item for key, item in message.items() if key != "tool_calls"}
        prepared.append(dict(message))
    return prepared


def _check_result(where: str, message: Mapping[str, Any], known: set[str]) -> None:
    call_id = message.get("tool_call_id")
    if not isinstance(call_id, str) or call_id not in known:
        raise RequestError(
            f"{where}.tool_call_id={shorten(call_id)} is not the id of a tool call in an earlier "
            "message of the assistant.",
            parameter=f"{where}.tool_call_id",
        )


def _read_calls(where: str, calls: object, *, with_objects: bool) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, (str, bytes)):
        raise invalid(where, calls, "a list of tool calls")
    if len(calls) > MAX_CALLS:
        raise RequestError(
            f"{where} has {len(calls)} entries; at most {MAX_CALLS} are accepted.", parameter=where
        )
    return [
        _read_call(f"{where}[{index}]", call, with_objects=with_objects)
        for index, call in enumerate(calls)
    ]


def _read_call(where: str, call: object, *, with_objects: bool) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise invalid(where, call, 'an object with "id", "type" and "function"')
    if not isinstance(function.get("name"), str):
        raise invalid(f"{where}.function.name", function.get("name"), "a string")
    if "id" in call and not isinstance(call["id"], str):
        raise invalid(f"{where}.id", call["id"], "a string")
    field, arguments = f"{where}.function.arguments", function.get("arguments", {})
    if not isinstance(arguments, (str, Mapping)):
        raise invalid(field, arguments, "a string with a JSON object")
    shown = _object_of(arguments) if with_objects else _text_of(field, arguments)
    return {**call, "function": {**function, "arguments": shown}}


def _text_of(field: str, arguments: str | Mapping[str, Any]) -> str:
    if isinstance(arguments, str):
        return arguments
    try:
        return json.dumps(arguments, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        raise invalid(field, arguments, "an object that JSON can represent") from None


def _object_of(arguments: str | Mapping[str, Any]) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments
