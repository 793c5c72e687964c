"""The parts of a GGUF file, which tests can damage before they are written."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

U8, I8, U16, U32, I32, F32, BOOL, STRING, ARRAY, U64 = 0, 1, 2, 4, 5, 6, 7, 8, 9, 10
_FORMS = {U8: "<B", I8: "<b", U16: "<H", U32: "<I", I32: "<i", F32: "<f", BOOL: "<?", U64: "<Q"}


@dataclass
class WrongLengthValue:
    """A value written with a wrong length. count: the written length, or None for the correct
    length."""

    value: Any
    count: int | None = None


@dataclass
class Parts:
    """The parts of a file. metadata: key to (type, value). tensors: name, shape, type, offset."""

    metadata: dict[str, tuple[int, Any]]
    tensors: list[list[Any]]
    data: bytes
    magic: bytes = b"GGUF"
    version: int = 3
    counts: list[int | None] = field(default_factory=lambda: [None, None])
    alignment: int = 32

    def to_bytes(self) -> bytes:
        num_tensors, num_entries = self.counts
        head = self.magic + struct.pack(
            "<IQQ",
            self.version,
            len(self.tensors) if num_tensors is None else num_tensors,
            len(self.metadata) if num_entries is None else num_entries,
        )
        for key, (kind, value) in self.metadata.items():
            head += _text(key) + struct.pack("<I", kind) + _value(kind, value)
        for name, shape, kind, offset in self.tensors:
            head += _text(name) + struct.pack("<I", len(shape))
            head += b"".join(struct.pack("<Q", size & (1 << 64) - 1) for size in shape)
            head += struct.pack("<IQ", kind, offset)
        return head + bytes(-len(head) % self.alignment) + self.data


def _text(value: Any) -> bytes:
    lie = value if isinstance(value, WrongLengthValue) else WrongLengthValue(value)
    content = lie.value if isinstance(lie.value, bytes) else lie.value.encode()
    return struct.pack("<Q", len(content) if lie.count is None else lie.count) + content


def _value(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return _text(value)
    if kind != ARRAY:
        return struct.pack(_FORMS.get(kind, "<I"), value)
    lie = value if isinstance(value, WrongLengthValue) else WrongLengthValue(value)
    inner, items = lie.value
    count = len(items) if lie.count is None else lie.count
    if isinstance(items, bytes):
        return struct.pack("<IQ", inner, count) + items
    return struct.pack("<IQ", inner, count) + b"".join(_value(inner, item) for item in items)
