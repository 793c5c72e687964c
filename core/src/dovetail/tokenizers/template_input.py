"""The input of a chat template: a conversation and JSON values, checked and of limited size.

A conversation may consist of any mappings and sequences; the template gets dicts and lists.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dovetail.errors import RequestError

MAX_TEMPLATE_CHARS = 1 << 18
MAX_VALUES = 100_000
"""Maximum values in a conversation or variable: strings, numbers, lists, mappings."""
MAX_CHARS = 1 << 22
MAX_DEPTH = 64
MAX_INTEGER_BITS = 1024


def check_messages(messages: object) -> None:
    """Raise RequestError, parameter "messages", if `messages` is not a conversation."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError(
            f"messages must be a list of messages, not {type(messages).__name__}.",
            parameter="messages",
        )
    if not messages:
        raise RequestError("messages is empty; pass at least one message.", parameter="messages")
    for position, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(
                f'messages[{position}] must be a mapping with a "role", such as '
                '{"role": "user", "content": "Hello"}.',
                parameter="messages",
            )


def plain_value(value: object, parameter: str) -> Any:
    """Return `value` as dicts, lists, strings and numbers.

    Raises RequestError, naming `parameter`, for other types, for lists that contain themselves, and
    for values above the limits of this module.
    """
    return _Reader(parameter).read(value, 0)


class _Reader:
    def __init__(self, parameter: str) -> None:
        self._parameter = parameter
        self._values_left = MAX_VALUES
        self._chars_left = MAX_CHARS

    def read(self, value: object, depth: int) -> Any:
        self._values_left -= 1
        if self._values_left < 0:
            self._reject(f"{self._parameter} contains more than {MAX_VALUES} values")
        if isinstance(value, str):
            return self._text(value)
        if value is None or isinstance(value, (bool, float)):
            return value
        if isinstance(value, int):
            if value.bit_length() > MAX_INTEGER_BITS:
                self._reject(
                    f"{self._parameter} contains an integer of more than {MAX_INTEGER_BITS} bits"
                )
            return value
        if depth >= MAX_DEPTH:
            self._reject(f"{self._parameter} is nested more than {MAX_DEPTH} levels deep")
        if isinstance(value, Mapping):
            return dict(self._items(value, depth))
        if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
            return [self.read(item, depth + 1) for item in value]
        return self._reject(
            f"{self._parameter} contains a {type(value).__name__}; use only strings, numbers, "
            "booleans, None, lists and mappings"
        )

    def _items(self, mapping: Mapping[Any, Any], depth: int) -> Iterator[tuple[str, Any]]:
        for key, value in mapping.items():
            if not isinstance(key, str):
                self._reject(
                    f"{self._parameter} contains a mapping with the key {key!r:.40}; keys must be "
                    "strings"
                )
            yield self._text(key), self.read(value, depth + 1)

    def _text(self, text: str) -> str:
        self._chars_left -= len(text)
        if self._chars_left < 0:
            self._reject(f"{self._parameter} contains more than {MAX_CHARS} characters")
        return text

    def _reject(self, problem: str) -> Any:
        raise RequestError(f"{problem}.", parameter=self._parameter)
