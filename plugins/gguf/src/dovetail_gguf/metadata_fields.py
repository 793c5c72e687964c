"""Reads and checks the metadata keys of a GGUF file. Metadata is untrusted."""

from __future__ import annotations

import math
import struct
from typing import Any

from dovetail.errors import ModelError
from dovetail_gguf.reader import GGUFFile

MAX_SIZE = 1 << 31


class Fields:
    """Reads and checks the metadata keys of one architecture."""

    def __init__(self, file: GGUFFile, name: str) -> None:
        self.file, self.name = file, name

    def get(self, key: str) -> Any:
        """Return the value of a key, or None if the file does not have the key."""
        return self.file.metadata.get(f"{self.name}.{key}")

    def integer(
        self, key: str, *, default: int | None = None, minimum: int = 0, maximum: int = MAX_SIZE
    ) -> int:
        """Return an integer. Some converters write one number per layer, all equal."""
        value = self.get(key)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]
        if value is None and default is not None:
            return default
        if type(value) is not int or not minimum <= value <= maximum:
            raise self._rejection(key, value, f"an integer from {minimum} to {maximum}")
        return value

    def number(self, key: str, *, default: float | None = None) -> float:
        """Return a positive number. Stored float32 values are rounded to 7 digits."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        good = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not good or not 0 < value < math.inf:
            raise self._rejection(key, value, "a positive number")
        return float(f"{value:.7g}")

    def flag(self, key: str, *, default: bool) -> bool:
        """Return a bool."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._rejection(key, value, "a bool")
        return value

    def has(self, leaf: str) -> bool:
        """Return whether the first layer has the tensor `leaf`, such as "attn_q.bias"."""
        return f"blk.0.{leaf}" in self.file.tensors

    def values(self, name: str) -> list[float]:
        """Return the values of a tensor of type F32 with one dimension, or [] if it is absent."""
        info = self.file.tensors.get(name)
        if info is None:
            return []
        if info.type.name != "F32" or len(info.shape) != 1:
            raise ModelError(
                f"{self.file.path}: {name} has the shape {list(info.shape)} and the type "
                f"{info.type.name}; expected one dimension of F32."
            )
        return [value for (value,) in struct.iter_unpack("<f", self.file.data(name))]

    def _rejection(self, key: str, value: object, expected: str) -> ModelError:
        description = "missing" if value is None else f"{value!r:.80}"
        return ModelError(
            f"{self.file.path}: {self.name}.{key} is {description}; it must be {expected}."
        )
