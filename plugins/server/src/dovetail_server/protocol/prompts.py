"""The prompts of a completion request: texts, lists of token ids, and batches of both."""

from __future__ import annotations

from typing import Any

from dovetail_server.protocol.errors import APIError

MAX_PROMPTS = 2048
"""Maximum number of prompts in one request."""

OnePrompt = str | list[int]


def read_prompts(given: Any) -> list[OnePrompt]:
    """Return the prompts in a field `prompt`. Raise an APIError that names an invalid entry."""
    if isinstance(given, str):
        return [given]
    if not isinstance(given, list):
        raise _refuse("prompt", "must be a string, a list of token ids, or a list of prompts")
    if not given:
        raise _refuse("prompt", "is an empty list; send at least one prompt or token id")
    if type(given[0]) is int:
        return [_token_ids("prompt", given)]
    if len(given) > MAX_PROMPTS:
        raise _refuse("prompt", f"has {len(given)} prompts; at most {MAX_PROMPTS} are accepted")
    return [_one(f"prompt[{index}]", item) for index, item in enumerate(given)]


def _one(name: str, given: Any) -> OnePrompt:
    if isinstance(given, str):
        return given
    if isinstance(given, list):
        return _token_ids(name, given)
    raise _refuse(name, "must be a string or a list of token ids")


def _token_ids(name: str, given: list[Any]) -> list[int]:
    if set(map(type, given)) - {int}:
        wrong = next(index for index, item in enumerate(given) if type(item) is not int)
        raise _refuse(f"{name}[{wrong}]", "must be a token id (an integer)")
    return given


def _refuse(name: str, why: str) -> APIError:
    return APIError(f"{name} {why}.", code="invalid_type", param=name)
