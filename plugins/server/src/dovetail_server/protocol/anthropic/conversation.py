"""Converts the messages and content blocks of a request to messages of a chat."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dovetail_server.protocol.errors import APIError

Block = Mapping[str, Any]


def messages_of(system: Any, messages: Sequence[Block]) -> list[dict[str, Any]]:
    """Return the messages of a chat. Raise an APIError that names an invalid block."""
    chat: list[dict[str, Any]] = []
    if system is not None and (text := _texts("system", system)):
        chat.append({"role": "system", "content": text})
    for index, message in enumerate(messages):
        name, role = f"messages[{index}]", message.get("role")
        if role == "system":
            chat.append(
                {"role": role, "content": _texts(f"{name}.content", message.get("content"))}
            )
        elif role == "user":
            chat += _of_user(f"{name}.content", message.get("content"))
        elif role == "assistant":
            chat.append(_of_assistant(f"{name}.content", message.get("content")))
        else:
            raise APIError(f'{name}.role must be "user" or "assistant".', param=f"{name}.role")
    return chat


def _of_user(name: str, content: Any) -> list[dict[str, Any]]:
    """Return the results of tools, and then the text, as the API orders them."""
    messages: list[dict[str, Any]] = []
    texts: list[str] = []
    for own, block in _blocks(name, content):
        if block.get("type") != "tool_result":
            texts.append(_text(own, block))
            continue
        call_id = _string(own, block, "tool_use_id")
        result = _texts(f"{own}.content", block.get("content") or "")
        messages.append({"role": "tool", "tool_call_id": call_id, "content": result})
    if texts or not messages:
        messages.append({"role": "user", "content": "".join(texts)})
    return messages


def _of_assistant(name: str, content: Any) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant"}
    texts: list[str] = []
    for own, block in _blocks(name, content):
        kind = block.get("type")
        if kind == "thinking":
            message["reasoning_content"] = _string(own, block, "thinking")
        elif kind == "tool_use":
            message.setdefault("tool_calls", []).append(_call(own, block))
        elif kind != "redacted_thinking":
            texts.append(_text(own, block))
    message["content"] = "".join(texts) or (None if "tool_calls" in message else "")
    return message


def _call(name: str, block: Block) -> dict[str, Any]:
    if type(block.get("input")) is not dict:
        raise APIError(
            f"{name}.input must be an object.", code="invalid_type", param=f"{name}.input"
        )
    arguments = json.dumps(block["input"], ensure_ascii=False)
    function = {"name": _string(name, block, "name"), "arguments": arguments}
    return {"id": _string(name, block, "id"), "type": "function", "function": function}


def _blocks(name: str, content: Any) -> list[tuple[str, Block]]:
    if isinstance(content, str):
        return [(name, {"type": "text", "text": content})]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise APIError(
            f"{name} must be a string or a list of content blocks.", code="invalid_type", param=name
        )
    return [(f"{name}[{index}]", block) for index, block in enumerate(content)]


def _texts(name: str, content: Any) -> str:
    return "".join(_text(own, block) for own, block in _blocks(name, content))


def _text(name: str, block: Block) -> str:
    kind = block.get("type")
    if kind != "text":
        raise APIError(
            f"{name}.type is {json.dumps(kind)[:40]}; this server does not support it here.",
            code="unsupported_parameter",
            param=f"{name}.type",
        )
    return _string(name, block, "text", may_be_empty=True)


def _string(name: str, block: Block, key: str, *, may_be_empty: bool = False) -> str:
    value = block.get(key)
    if not isinstance(value, str) or not (value or may_be_empty):
        code = "missing_required_parameter" if value is None else "invalid_type"
        raise APIError(f"{name}.{key} must be a string.", code=code, param=f"{name}.{key}")
    return value
