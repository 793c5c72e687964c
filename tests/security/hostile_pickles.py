"""Creates hostile pickles, which create a directory when loaded, and inserts them into valid data.

This module supports the three formats that Dovetail writes: msgpack, columns and JSON.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from dovetail.transport.columns import frame_kind, pack_columns, unpack_columns

PROTOCOLS = (0, 2, pickle.HIGHEST_PROTOCOL)
EXTENSIONS = (1, 2, 42)
Form = Callable[[bytes, bytes], Iterator[bytes]]
"""Inserts a pickle into valid content at several positions; yields the results."""


class _TraceMaker:
    def __init__(self, trace: Path) -> None:
        self._trace = str(trace)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.makedirs, (self._trace, 0o777, True)


def make_hostile_pickle(trace: Path, protocol: int) -> bytes:
    """Return a pickle that creates the directory `trace` when it is opened."""
    return pickle.dumps(_TraceMaker(trace), protocol)


def raw(good: bytes, pickled: bytes) -> Iterator[bytes]:
    """Yield the pickle alone, before, after and within the content."""
    yield pickled
    yield pickled + good
    yield good + pickled
    yield good[: len(good) // 2] + pickled + good[len(good) // 2 :]


def messagepack(good: bytes, pickled: bytes) -> Iterator[bytes]:
    """Yield the content with each msgpack value replaced by the pickle, as a value of several
    types."""
    yield from raw(good, pickled)
    content = msgspec.msgpack.decode(good, ext_hook=lambda code, data: bytes(data))
    extensions = [msgspec.msgpack.Ext(code, pickled) for code in EXTENSIONS]
    for value in (pickled, pickled.decode("latin-1"), *extensions):
        yield from map(msgspec.msgpack.encode, _replaced(content, value))


def behind(prefix_bytes: int, form: Form) -> Form:
    """Return a form that keeps the first `prefix_bytes` bytes and applies `form` to the other
    bytes."""

    def contents(good: bytes, pickled: bytes) -> Iterator[bytes]:
        yield from raw(good, pickled)
        yield from (good[:prefix_bytes] + item for item in form(good[prefix_bytes:], pickled))

    return contents


def text(good: bytes, pickled: bytes) -> Iterator[bytes]:
    """Yield the content with each JSON value replaced by the pickle, as text and as base64."""
    yield from raw(good, pickled)
    for value in (pickled.decode("latin-1"), base64.b64encode(pickled).decode()):
        yield from (json.dumps(item).encode() for item in _replaced(json.loads(good), value))


def columns(good: bytes, pickled: bytes) -> Iterator[bytes]:
    """Yield the content with each column, and each msgpack value in a column, replaced."""
    yield from raw(good, pickled)
    kind = frame_kind(good)
    frame = unpack_columns(good, kind, minimum=0)
    actual = [bytes(column) for column in frame.columns]
    padded = pickled + bytes(-len(pickled) % 4)
    for index, column in enumerate(actual):
        for new in (pickled, padded, *_if_messagepack(column, pickled)):
            changed = [*actual[:index], new, *actual[index + 1 :]]
            yield pack_columns(kind, changed, frame.numbers)


def _if_messagepack(column: bytes, pickled: bytes) -> Iterator[bytes]:
    try:
        yield from messagepack(column, pickled)
    except msgspec.DecodeError:
        return


def _replaced(content: Any, new: Any) -> Iterator[Any]:
    """Yield `content` once for each value and str key in it, with that value or key replaced."""
    yield new
    if isinstance(content, list):
        for index, item in enumerate(content):
            for other in _replaced(item, new):
                yield [*content[:index], other, *content[index + 1 :]]
    if isinstance(content, dict):
        for key, item in content.items():
            for other in _replaced(item, new):
                yield {**content, key: other}
            if isinstance(new, str):
                yield {**content, new: item}
