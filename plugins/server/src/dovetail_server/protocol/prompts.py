"""The prompts of a completion request: strings, lists of token ids, and batches of both."""

from __future__ import annotations

from typing import Any

from dovetail_server.protocol.errors import APIError

MAX_PROMPTS = 2048
"""Maximum number of prompts in one request."""

OnePrompt = str | list[int]


def read_prompts(value: Any, field: str = "prompt") -> list[OnePrompt]:
    """Return the prompts in a field. Raise an APIError that names an invalid entry."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise _reject(field, "must be a string, a list of token ids, or a list of prompts")
    if not value:
        raise _reject(field, "is an empty list; send at least one prompt or token id")
    if type(value[0]) is int:
        return [_token_ids(field, value)]
    if len(value) > MAX_PROMPTS:
        raise _reject(field, f"has {len(value)} prompts; at most {MAX_PROMPTS} are accepted")
    return [_one(f"{field}[{index}]", item) for index, item in enumerate(value)]


def _one(name: str, value: Any) -> OnePrompt:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return _token_ids(name, value)
    raise _reject(name, "must be a string or a list of token ids")


def _token_ids(name: str, token_ids: list[Any]) -> list[int]:
    if set(map(type, token_ids)) - {int}:
        invalid = next(index for index, item in enumerate(token_ids) if type(item) is not int)
        raise _reject(f"{name}[{invalid}]", "must be a token id (an integer)")
    return token_ids


def _reject(name: str, why: str) -> APIError:
    return APIError(f"{name} {why}.", code="invalid_type", param=name)
