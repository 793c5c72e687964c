"""Checks the tool calls and tool results in a conversation, and prepares them for a template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.errors import RequestError
from dovetail.value_checks import refuse, shorten

MAX_CALLS = 256
"""Maximum number of tool calls in a message."""


def prepare_history(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with the arguments of calls as objects, which chat templates expect.

    Arguments that are not a JSON object stay texts. Raises RequestError, naming the field, for an
    invalid call, and for a result whose id is not that of an earlier call.
    """
    known: set[str] = set()
    prepared = []
    for place, message in enumerate(messages):
        where = f"messages[{place}]"
        if message.get("role") == "tool":
            _check_result(where, message, known)
        calls = message.get("tool_calls")
        if calls:
            calls = _read_calls(f"{where}.tool_calls", calls)
            known.update(one["id"] for one in calls if "id" in one)
            message = {**message, "tool_calls": calls}
        elif "tool_calls" in message:
            message = {key: one for key, one in message.items() if key != "tool_calls"}
        prepared.append(dict(message))
    return prepared


def _check_result(where: str, message: Mapping[str, Any], known: set[str]) -> None:
    given = message.get("tool_call_id")
    if not isinstance(given, str) or given not in known:
        raise RequestError(
            f"{where}.tool_call_id={shorten(given)} is not the id of a tool call in an earlier "
            "message of the assistant.",
            parameter=f"{where}.tool_call_id",
        )


def _read_calls(where: str, calls: object) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, (str, bytes)):
        raise refuse(where, calls, "a list of tool calls")
    if len(calls) > MAX_CALLS:
        raise RequestError(
            f"{where} has {len(calls)} entries; at most {MAX_CALLS} are accepted.", parameter=where
        )
    return [_read_call(f"{where}[{place}]", one) for place, one in enumerate(calls)]


def _read_call(where: str, call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise refuse(where, call, 'an object with "id", "type" and "function"')
    if not isinstance(function.get("name"), str):
        raise refuse(f"{where}.function.name", function.get("name"), "a string")
    if "id" in call and not isinstance(call["id"], str):
        raise refuse(f"{where}.id", call["id"], "a string")
    arguments = function.get("arguments", {})
    if not isinstance(arguments, (str, Mapping)):
        raise refuse(f"{where}.function.arguments", arguments, "a string with a JSON object")
    return {**call, "function": {**function, "arguments": _arguments(arguments)}}


def _arguments(given: str | Mapping[str, Any]) -> Any:
    if not isinstance(given, str):
        return given
    try:
        found = json.loads(given) if given.strip() else {}
    except (ValueError, RecursionError):
        return given
    return found if isinstance(found, dict) else given
