"""Encodes values between an executor and its workers: arguments of operations and responses.

Supported are plain data, arrays (`NDArray`, and objects that expose their memory) and the
dataclasses of the worker's contract; a tuple or a set is received as a list. Only the dataclasses
in a fixed list are supported, and their fields are checked; a received name is looked up only in
this list.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import fields
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from dovetail.errors import MessageError
from dovetail.interfaces.kv_cache import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    LatentAttentionSpec,
    NoCacheSpec,
    StateSpec,
)
from dovetail.interfaces.worker import ModelInfo
from dovetail.transport.ndarray import NDArray
from dovetail.transport.wire_types import encode

MAX_DEPTH = 64
_ARRAY = 1
_RECORD = 2
_PLAIN = (bool, int, float, str, bytes, type(None))
_RECORDS: dict[str, type[Any]] = {
    cls.__name__: cls
    for cls in (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroup,
        LatentAttentionSpec,
        ModelInfo,
        NoCacheSpec,
        StateSpec,
    )
}
_HINTS = {name: get_type_hints(cls) for name, cls in _RECORDS.items()}


def pack_value(value: Any) -> bytes:
    """Encode `value`. Raise MessageError naming a type that cannot be sent."""
    return encode(_plain(value, 0))


def unpack_value(content: bytes | memoryview) -> Any:
    """Decode a value that `pack_value` encoded. Raises MessageError if the bytes are not valid."""
    try:
        return msgspec.msgpack.decode(content, ext_hook=_read_extension)
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
        raise MessageError(f"{len(content)} bytes cannot be decoded: {error}") from None


def _plain(value: Any, depth: int) -> Any:
    """Return `value` with types that msgpack does not support converted to extensions."""
    if type(value) in _PLAIN:
        return value
    if depth > MAX_DEPTH:
        raise MessageError(
            f"a value that is nested more than {MAX_DEPTH} levels deep cannot be sent."
        )
    if isinstance(value, Mapping):
        return {_key(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple, Set)):
        return [_plain(item, depth + 1) for item in value]
    if isinstance(value, NDArray):
        return _array(value)
    if type(value) is _RECORDS.get(type(value).__name__):
        return _record(value, depth)
    try:
        return _array(NDArray.of(value))
    except TypeError:
        raise MessageError(
            f"an object of the class {type(value).__module__}.{type(value).__qualname__} cannot be "
            "sent: use plain data, or an NDArray for a tensor."
        ) from None


def _key(key: Any) -> Any:
    if type(key) not in _PLAIN:
        raise MessageError(f"a key of type {type(key).__qualname__} cannot be sent.")
    return key


def _array(value: NDArray) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(_ARRAY, encode((value.dtype, value.shape, value.data)))


def _record(value: Any, depth: int) -> msgspec.msgpack.Ext:
    packed = {field.name: _plain(getattr(value, field.name), depth + 1) for field in fields(value)}
    return msgspec.msgpack.Ext(_RECORD, encode((type(value).__name__, packed)))


def _read_extension(code: int, data: memoryview) -> Any:
    if code == _ARRAY:
        dtype, shape, content = msgspec.msgpack.decode(
            data, type=tuple[str, tuple[int, ...], bytes]
        )
        return NDArray(dtype, shape, content)
    if code != _RECORD:
        raise ValueError(f"extension type {code} is not supported")
    name, packed = msgspec.msgpack.decode(
        data, type=tuple[str, dict[str, Any]], ext_hook=_read_extension
    )
    hints = _HINTS.get(name)
    if hints is None or not packed.keys() <= hints.keys():
        raise ValueError(f"{name!r} with the fields {sorted(packed)} is not a known dataclass")
    return _RECORDS[name](**{key: _fitting(item, hints[key]) for key, item in packed.items()})


def _fitting(value: Any, hint: Any) -> Any:
    """Return a field's value, with tuples restored. Raise ValueError for a wrong type."""
    if get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise ValueError(f"expected a list, got {type(value).__name__}")
        return tuple(_fitting(item, get_args(hint)[0]) for item in value)
    if not isinstance(value, hint) or isinstance(value, bool) is not (hint is bool):
        raise ValueError(f"expected {hint.__name__}, got {type(value).__name__}")
    return value
