"""Checks of client values: type, size, and whether a value can be serialized.

Every check compares sizes before it copies or converts, never calls `len` or `repr` of an object
that is not a built-in, and raises RequestError with the parameter. Standard library only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import islice
from typing import Any, TypeVar

from dovetail.errors import RequestError, nearest

C = TypeVar("C", bound=type)
T = TypeVar("T")

MAX_SHOWN_CHARS = 80
MAX_NESTING = 16
MAX_OPTION_DEPTH = 64
"""Maximum number of nested mappings and lists in an engine option, as in a model's files."""
_BUILT_IN: tuple[type, ...] = (list, tuple, range, dict, set, frozenset, type({}.items()))
"""Containers whose `len` is reliable and fast."""

_SHOWN_ITEMS = 6
_SHOWN_BITS = 256
_NUMBER_BYTES = 9
"""Maximum serialized bytes of a number, of None, or of the header of a string or container."""


def shorten(value: object) -> str:
    """Return `value` for an error message: one line of at most 80 characters. Never raise."""
    shown = _shown(value, 2)
    return shown if len(shown) <= MAX_SHOWN_CHARS else shown[: MAX_SHOWN_CHARS - 3] + "..."


def _shown(value: object, depth: int) -> str:
    kind = type(value)
    if kind is str or kind is bytes or kind is bytearray:
        head = repr(value[:MAX_SHOWN_CHARS])  # type: ignore[index]  # str, bytes or bytearray
        return head if len(value) <= MAX_SHOWN_CHARS else f"{head}..."  # type: ignore[arg-type]
    if kind is int and value.bit_length() > _SHOWN_BITS:  # type: ignore[attr-defined]
        return f"an integer of {value.bit_length()} bits"  # type: ignore[attr-defined]
    if issubclass(kind, (list, tuple, set, frozenset, dict)):
        return _shown_container(value, depth)
    if hasattr(kind, "__len__") or hasattr(kind, "__dataclass_fields__"):
        return f"<{kind.__name__}>"  # its `repr` may be slow
    try:
        return repr(value)[: MAX_SHOWN_CHARS + 1].replace("\n", " ")
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:
        return f"<{kind.__name__}>"


def _shown_container(value: Any, depth: int) -> str:
    kind = type(value)
    if kind not in (list, tuple, set, frozenset, dict) or not depth:
        return f"<{kind.__name__}>"
    items = list(islice(value.items() if kind is dict else value, _SHOWN_ITEMS))
    more = ", ..." if len(value) > len(items) else ""
    if kind is dict:
        shown = (f"{_shown(key, depth - 1)}: {_shown(item, depth - 1)}" for key, item in items)
        return "{" + ", ".join(shown) + more + "}"
    listed = ", ".join(_shown(item, depth - 1) for item in items) + more
    if kind is tuple:
        return f"({listed},)" if len(value) == 1 else f"({listed})"
    if kind is list:
        return f"[{listed}]"
    return f"{kind.__name__}({{{listed}}})" if kind is frozenset or not items else f"{{{listed}}}"


def exceeds_depth(value: object) -> bool:
    """Return whether mappings and lists nest deeper than `MAX_OPTION_DEPTH`. Never recurse."""
    waiting: list[tuple[Any, int]] = [(value, 1)]
    while waiting:
        item, depth = waiting.pop()
        if isinstance(item, (Mapping, list, tuple)):
            if depth > MAX_OPTION_DEPTH:
                return True
            parts = item.values() if isinstance(item, Mapping) else item
            waiting += [(part, depth + 1) for part in parts]
    return False


def invalid(parameter: str, value: object, expected: str) -> RequestError:
    """Return the error for an invalid `value`.

    expected: a description of the accepted values, for the message.
    """
    return RequestError(f"{parameter}={shorten(value)} must be {expected}.", parameter=parameter)


def check_names(
    owner: str, names: Iterable[str], known: Sequence[str], *, prefix: str = ""
) -> None:
    """Raise RequestError for the first name that is not in `known`, with the most similar name.

    owner: the class or field that has the names. prefix: the text before the name in the
    parameter of the error.
    """
    for name in map(plain_text, names):
        if name not in known:
            hint = nearest(name, known) or f" Parameters: {', '.join(known)}."
            raise RequestError(
                f"{owner} has no parameter {shorten(name)}.{hint}",
                parameter=prefix + name[:MAX_SHOWN_CHARS],
            )


def with_known_names(cls: C) -> C:
    """Make the constructor of a dataclass raise RequestError for an unknown parameter."""
    construct = cls.__init__  # type: ignore[misc]  # of this class, not of a subclass
    known = [parameter.name for parameter in fields(cls)]

    @functools.wraps(construct)
    def explain(self: object, *args: Any, **kwargs: Any) -> None:
        try:
            construct(self, *args, **kwargs)
        except TypeError:  # checked here, because most calls have only known names
            check_names(cls.__name__, kwargs, known)
            raise

    type.__setattr__(cls, "__init__", explain)
    return cls


def check_integer(
    parameter: str, value: object, low: int, high: int, *, optional: bool = False
) -> None:
    """Raise RequestError unless `value` is an int in [low, high], or None if `optional`."""
    if optional and value is None:
        return
    if type(value) is not int or not low <= value <= high:
        also = "None or " if optional else ""
        raise invalid(parameter, value, f"{also}an integer from {low} to {high}")


def check_number(
    parameter: str, value: object, low: float, high: float, *, open_low: bool = False
) -> float:
    """Return `value` as a float. Raise RequestError unless it is a finite number in the bounds.

    Methods of a subclass of int or float are not called.
    """
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise invalid(parameter, value, "a finite number")
    if type(value) not in (int, float):
        value = int.__pos__(value) if isinstance(value, int) else float.__pos__(value)
    # Compared before the conversion, because an int may be too large for a float.
    if not low <= value <= high or (open_low and value == low):
        if not isinstance(value, int) and not math.isfinite(value):
            raise invalid(parameter, value, "a finite number")
        closed, opened = f"from {low:g} to {high:g}", f"above {low:g} and at most {high:g}"
        raise invalid(parameter, value, opened if open_low else closed)
    return float(value)


def check_flag(parameter: str, value: object) -> None:
    """Raise RequestError unless `value` is True or False."""
    if type(value) is not bool:
        raise invalid(parameter, value, "True or False")


def check_text(
    parameter: str, value: object, *, max_chars: int, min_chars: int = 0, limit: str = ""
) -> str:
    """Return `value` as a plain str. Raise RequestError if it is not a str, too long or invalid.

    limit: the engine option that sets `max_chars`, for the message; "" for none.
    """
    if not issubclass(type(value), str):
        raise invalid(parameter, value, "a string")
    text = plain_text(value)  # type: ignore[arg-type]
    if not min_chars <= len(text) <= max_chars:
        minimum = f"at least {min_chars} character{'s' if min_chars > 1 else ''} and " * bool(
            min_chars
        )
        option = f" ({limit})" if limit else ""
        raise RequestError(
            f"{parameter}={shorten(text)} has {len(text)} characters; it must have {minimum}at "
            f"most {max_chars}{option}.",
            parameter=parameter,
        )
    if not text.isascii():
        check_encodable(parameter, text)
    return text


def plain_text(value: str) -> str:
    """Return a str as a plain str without calling methods of a subclass."""
    return value if type(value) is str else str.__str__(value)


def check_encodable(parameter: str, text: str) -> None:
    """Raise RequestError if `text` has lone surrogates, which UTF-8 cannot encode."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{parameter} has the lone surrogate {text[error.start]!a} at character "
            f"{error.start}; it must be valid Unicode, encodable as UTF-8.",
            parameter=parameter,
        ) from None


def take_items(
    parameter: str, items: Iterable[T], max_items: int, *, what: str, limit: str = ""
) -> list[T]:
    """Return the items of an iterable. Raise RequestError if there are more than `max_items`.

    Reads at most `max_items` + 1 items of `items`. An exception of its iterator becomes a
    RequestError. what: a noun for the items, for the message.
    """
    built_in = type(items) in _BUILT_IN
    if built_in and len(items) > max_items:  # type: ignore[arg-type]  # those have a length
        raise _too_many(parameter, len(items), max_items, what, limit)  # type: ignore[arg-type]
    taken = guarded(parameter, lambda: list(islice(items, max_items + 1)))
    if len(taken) > max_items:
        raise _too_many(parameter, f"more than {max_items}", max_items, what, limit)
    return taken


def _too_many(
    parameter: str, count: int | str, maximum: int, what: str, limit: str
) -> RequestError:
    option = f" ({limit})" if limit else ""
    return RequestError(
        f"{parameter} has {count} {what}; at most {maximum} are accepted{option}.",
        parameter=parameter,
    )


def guarded(parameter: str, read: Callable[[], T]) -> T:
    """Return the result of `read`, which may call methods of objects that a client passed.

    Their exceptions are converted to RequestError, except KeyboardInterrupt and SystemExit.
    """
    try:
        return read()
    except (RequestError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise RequestError(
            f"{parameter} cannot be read: {type(error).__name__}: {_message_of(error)}. Pass "
            "built-in strings, lists, mappings and numbers.",
            parameter=parameter,
        ) from error


def _message_of(error: BaseException) -> str:
    try:
        return shorten(str(error))
    except Exception:
        return "(without a message)"


def plain_copy(parameter: str, value: object, *, max_bytes: int, limit: str = "") -> Any:
    """Return a deep copy of plain data: None, bool, int, float, str, bytes, lists and mappings.

    Tuples become lists and mappings become dicts, as after a transfer to another process.
    max_bytes: approximate maximum of the serialized size. Raises RequestError if the data is larger
    or contains other types, integers of more than 64 bits, or more than 16 levels of nesting.
    """
    return guarded(parameter, lambda: _PlainCopy(parameter, max_bytes, limit).copy(value, 0))


class _PlainCopy:
    """A traversal of plain data that counts the remaining bytes."""

    def __init__(self, parameter: str, max_bytes: int, limit: str) -> None:
        self._parameter = parameter
        self._max_bytes = max_bytes
        self._left = max_bytes
        self._limit = f" ({limit})" if limit else ""

    def copy(self, value: object, depth: int) -> Any:
        self._take(_NUMBER_BYTES)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, (str, bytes)):
            return self._text(value)
        if isinstance(value, float):
            return float.__pos__(value)
        if isinstance(value, int):
            number = int.__pos__(value)
            check_integer(self._parameter, number, -(2**63), 2**64 - 1)
            return number
        if depth == MAX_NESTING:
            raise RequestError(
                f"{self._parameter} is nested more than {MAX_NESTING} levels deep; flatten it.",
                parameter=self._parameter,
            )
        if isinstance(value, Mapping):
            pairs = value.items()
            return {self._key(key): self.copy(item, depth + 1) for key, item in pairs}
        if isinstance(value, (list, tuple)):
            self._take(0 if type(value) not in _BUILT_IN else len(value))
            return [self.copy(item, depth + 1) for item in value]
        raise RequestError(
            f"{self._parameter} contains {shorten(value)} of the type {type(value).__name__}; it "
            "must be plain data: None, booleans, numbers, strings, bytes, lists and mappings.",
            parameter=self._parameter,
        )

    def _key(self, key: object) -> str | int:
        self._take(_NUMBER_BYTES)
        if isinstance(key, str):
            return str(self._text(key))
        check_integer(f"{self._parameter}", key, -(2**63), 2**63 - 1)
        return int(key)  # type: ignore[call-overload,no-any-return]  # checked

    def _text(self, value: str | bytes) -> str | bytes:
        if isinstance(value, bytes):
            self._take(bytes.__len__(value))
            return value if type(value) is bytes else bytes.__getitem__(value, slice(None))
        text = plain_text(value)
        self._take(len(text))
        if not text.isascii():
            check_encodable(self._parameter, text)
            self._take(len(text.encode()) - len(text))
        return text

    def _take(self, num_bytes: int) -> None:
        self._left -= num_bytes
        if self._left < 0:
            raise RequestError(
                f"{self._parameter} is too large: at most {self._max_bytes} bytes are accepted"
                f"{self._limit}; send less.",
                parameter=self._parameter,
            )


def take_strings(
    name: str, strings: object, maximum: int, max_chars: int, *, allow_one: bool = False
) -> tuple[str, ...]:
    """Return the strings of a parameter, at most `maximum`. Raise RequestError for other values.

    allow_one: whether the value may be a string instead of a list.
    """
    if strings is None:
        return ()
    if allow_one and isinstance(strings, str):
        strings = (strings,)
    if not isinstance(strings, (list, tuple)):
        raise invalid(name, strings, f"{'a string or ' * allow_one}a list of strings")
    items = take_items(name, strings, maximum, what="strings")
    plain = tuple(plain_text(item) if isinstance(item, str) else item for item in items)
    check_strings(name, plain, maximum, max_chars)
    return plain


def check_strings(name: str, strings: Sequence[str], maximum: int, max_chars: int) -> None:
    """Raise RequestError unless `strings` has at most `maximum` valid, non-empty strings."""
    if not isinstance(strings, (list, tuple)):
        raise invalid(name, strings, "a list of strings")
    if len(strings) > maximum:
        raise invalid(name, strings, f"at most {maximum} strings")
    for string in strings:
        if not isinstance(string, str) or not string:
            raise invalid(name, strings, "a list of strings that are not empty")
        check_text(name, string, max_chars=max_chars)


def take_ids(name: str, token_ids: object, maximum: int, max_id: int) -> tuple[int, ...] | None:
    """Return the token ids of a parameter without duplicates, in their order, or None if unset."""
    if token_ids is None:
        return None
    if not isinstance(token_ids, (list, tuple)):
        raise invalid(name, token_ids, "a list of token ids")
    ids = take_items(name, token_ids, maximum, what="token ids")
    check_ids(name, ids, max_id)
    return tuple(dict.fromkeys(ids))


def check_ids(name: str, ids: Sequence[int], max_id: int) -> None:
    """Raise RequestError unless all items are token ids from 0 to `max_id`."""
    if not isinstance(ids, (list, tuple)):
        raise invalid(name, ids, "a list of token ids")
    if not ids:
        return
    if set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) > max_id:
        wrong = next(i for i in ids if type(i) is not int or not 0 <= i <= max_id)
        raise RequestError(
            f"{name} contains {shorten(wrong)}; token ids must be integers from 0 to {max_id}.",
            parameter=name,
        )
