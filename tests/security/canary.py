"""A pickle that leaves a trace when it is opened, and contents that contain it in every place.

Handles the three formats of Dovetail's own bytes: msgpack, columns and JSON.
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
"""Maps valid content and a canary to contents with the canary in some place."""


class _Canary:
    def __init__(self, trace: Path) -> None:
        self._trace = str(trace)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.makedirs, (self._trace, 0o777, True)


def make_canary(trace: Path, protocol: int) -> bytes:
    """Return a pickle that creates the folder `trace` when it is opened."""
    return pickle.dumps(_Canary(trace), protocol)


def raw(good: bytes, canary: bytes) -> Iterator[bytes]:
    """Yield the canary alone, before, behind and within the content."""
    yield canary
    yield canary + good
    yield good + canary
    yield good[: len(good) // 2] + canary + good[len(good) // 2 :]


def messagepack(good: bytes, canary: bytes) -> Iterator[bytes]:
    """Yield the content with each msgpack value replaced: by bytes, text and an extension."""
    yield from raw(good, canary)
    content = msgspec.msgpack.decode(good, ext_hook=lambda code, data: bytes(data))
    extensions = [msgspec.msgpack.Ext(code, canary) for code in EXTENSIONS]
    for value in (canary, canary.decode("latin-1"), *extensions):
        yield from map(msgspec.msgpack.encode, _replaced(content, value))


def behind(prefix_bytes: int, form: Form) -> Form:
    """Return the form of contents that have a prefix before another form."""

    def contents(good: bytes, canary: bytes) -> Iterator[bytes]:
        yield from raw(good, canary)
        yield from (good[:prefix_bytes] + one for one in form(good[prefix_bytes:], canary))

    return contents


def text(good: bytes, canary: bytes) -> Iterator[bytes]:
    """Yield the content with each JSON value replaced by the canary, as text and as base64."""
    yield from raw(good, canary)
    for value in (canary.decode("latin-1"), base64.b64encode(canary).decode()):
        yield from (json.dumps(one).encode() for one in _replaced(json.loads(good), value))


def columns(good: bytes, canary: bytes) -> Iterator[bytes]:
    """Yield the content with each column, and each value in msgpack columns, replaced."""
    yield from raw(good, canary)
    kind = frame_kind(good)
    frame = unpack_columns(good, kind, least=0)
    found = [bytes(column) for column in frame.columns]
    padded = canary + bytes(-len(canary) % 4)
    for place, column in enumerate(found):
        for new in (canary, padded, *_if_messagepack(column, canary)):
            changed = [*found[:place], new, *found[place + 1 :]]
            yield pack_columns(kind, changed, frame.numbers)


def _if_messagepack(column: bytes, canary: bytes) -> Iterator[bytes]:
    try:
        yield from messagepack(column, canary)
    except msgspec.DecodeError:
        return


def _replaced(content: Any, new: Any) -> Iterator[Any]:
    """Yield `content` once for each value and str key in it, with that one replaced."""
    yield new
    if isinstance(content, list):
        for place, one in enumerate(content):
            for other in _replaced(one, new):
                yield [*content[:place], other, *content[place + 1 :]]
    if isinstance(content, dict):
        for key, one in content.items():
            for other in _replaced(one, new):
                yield {**content, key: other}
            if isinstance(new, str):
                yield {**content, new: one}
