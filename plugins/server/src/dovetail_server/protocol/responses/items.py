"""The items of a conversation, and the messages of a chat that they describe."""

from __future__ import annotations

import base64
import binascii
import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from dovetail_server.protocol.errors import APIError

Item = dict[str, Any]
REFERENCE = "item_reference"
"""The type of an item that names a stored output item."""
TEXT_PARTS = ("input_text", "output_text", "text")
PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco"}
PREFIXES |= {"reasoning": "rs"}


def read_items(value: Any) -> list[Item]:
    """Return the items of the `input` field, each with an id. Raise APIError for an invalid item.

    Items of the type `item_reference` are returned unchanged.
    """
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise APIError(
            "input must be a string or a list of items (objects).",
            code="invalid_type",
            param="input",
        )
    return [_item(f"input[{index}]", item) for index, item in enumerate(value)]


def _item(name: str, item: Item) -> Item:
    kind = item.get("type")
    if kind is None and "role" in item:
        kind = "message"
    if kind == REFERENCE:
        _need(name, item, "id")
        return item
    if not isinstance(kind, str) or kind not in PREFIXES:
        raise APIError(
            f"{name}.type is {str(kind)[:40]!r}; this server supports: "
            f"{', '.join(PREFIXES)}, {REFERENCE}.",
            code="unsupported_parameter",
            param=f"{name}.type",
        )
    for key in {"function_call": ("call_id", "name", "arguments"), "message": ("role",)}.get(
        kind, ("call_id",) if kind == "function_call_output" else ()
    ):
        _need(name, item, key)
    if kind == "message":
        _text(f"{name}.content", item.get("content"))
    elif kind == "function_call_output":
        _text(f"{name}.output", item.get("output"))
    elif kind == "reasoning":
        _reasoning(name, item)
    new_id = f"{PREFIXES[kind]}_{uuid.uuid4().hex}"
    provided = item.get("id")
    return {
        **item,
        "type": kind,
        "id": provided if isinstance(provided, str) and provided else new_id,
    }


def messages_of(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Return the messages of a chat. Calls and reasoning belong to the assistant's message."""
    messages: list[dict[str, Any]] = []
    pending: dict[str, Any] | None = None  # a message of the assistant that may get calls
    for index, item in enumerate(items):
        name, kind = f"input[{index}]", item["type"]
        if kind in ("message", "function_call_output") and item.get("role") != "assistant":
            pending = None
        if kind == "function_call_output":
            content = _text(f"{name}.output", item["output"])
            result = {"role": "tool", "tool_call_id": item["call_id"], "content": content}
            messages.append(result)
        elif kind == "message" and item["role"] != "assistant":
            content = _text(f"{name}.content", item["content"])
            messages.append({"role": item["role"], "content": content})
        else:
            if pending is None or (kind != "function_call" and "content" in pending):
                pending = {"role": "assistant"}
                messages.append(pending)
            _add_to_assistant(name, pending, item)
    for message in messages:
        message.setdefault("content", None if message.get("tool_calls") else "")
    return messages


def _add_to_assistant(name: str, message: dict[str, Any], item: Item) -> None:
    if item["type"] == "reasoning":
        message["reasoning_content"] = _reasoning(name, item)
    elif item["type"] == "message":
        message["content"] = _text(f"{name}.content", item["content"])
    else:
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        message.setdefault("tool_calls", []).append(call)


def encrypt(text: str) -> str:
    """Return reasoning in the format of `encrypted_content`. It is encoded, not encrypted."""
    return base64.b64encode(text.encode()).decode()


def _reasoning(name: str, item: Mapping[str, Any]) -> str:
    """Return the text of a reasoning item."""
    for key, kind in (("content", "reasoning_text"), ("summary", "summary_text")):
        parts = item.get(key) or []
        if not isinstance(parts, list) or not all(
            isinstance(part, dict)
            and part.get("type") == kind
            and isinstance(part.get("text"), str)
            for part in parts
        ):
            raise APIError(
                f'{name}.{key} must be a list of {{"type": "{kind}", "text": "…"}}.',
                code="invalid_type",
                param=f"{name}.{key}",
            )
        if parts:
            return "".join(part["text"] for part in parts)
    hidden = item.get("encrypted_content")
    if hidden is None:
        return ""
    try:
        return base64.b64decode(hidden, validate=True).decode()
    except (binascii.Error, TypeError, ValueError):
        raise APIError(
            f"{name}.encrypted_content is not from this server.", param=f"{name}.encrypted_content"
        ) from None


def _text(name: str, content: Any) -> str:
    """Return the text of an item's content. Raise APIError if it has other parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise APIError(
            f"{name} must be a string or a list of parts.", code="invalid_type", param=name
        )
    return "".join(_part(f"{name}[{index}]", part) for index, part in enumerate(content))


def _part(name: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
    if (kind in TEXT_PARTS or kind == "refusal") and isinstance(text, str):
        return text
    unknown = isinstance(kind, str) and kind not in TEXT_PARTS
    raise APIError(
        f"{name}.type is {json.dumps(kind)[:40]}; this model accepts only text."
        if unknown
        else f'{name} must be {{"type": "input_text", "text": "…"}}.',
        code="unsupported_parameter" if unknown else "invalid_type",
        param=f"{name}.type" if unknown else name,
    )


def _need(name: str, item: Item, key: str) -> None:
    if not isinstance(item.get(key), str) or not item[key]:
        code = "missing_required_parameter" if item.get(key) is None else "invalid_type"
        raise APIError(
            f"{name}.{key} must be a non-empty string.", code=code, param=f"{name}.{key}"
        )
