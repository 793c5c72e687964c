"""Arrays as element type, shape and bytes, independent of tensor libraries.

An object that exposes its memory (a numpy array, an `array.array`) can be sent directly. The sender
converts any other tensor to an `NDArray`, and the receiver converts it back. This module imports no
tensor library and knows element types only by name and size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dovetail.errors import MessageError

ELEMENT_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
}
MAX_DIMENSIONS = 32

_FORMATS = {
    "bool": "?",
    "uint8": "B",
    "int8": "b",
    "int16": "h",
    "int32": "i",
    "float32": "f",
    "int64": "q",
    "float64": "d",
}
_DTYPES = {form: name for name, form in _FORMATS.items()} | {"e": "float16", "l": "int64"}


@dataclass(frozen=True, slots=True)
class NDArray:
    """An array. dtype: a key of ELEMENT_BYTES. data: in row-major order and native byte order.

    Raises MessageError if dtype, shape and data are inconsistent.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def __post_init__(self) -> None:
        size = ELEMENT_BYTES.get(self.dtype)
        if size is None:
            raise MessageError(
                f"an array with elements of type {self.dtype!r} cannot be sent; use one of "
                f"{', '.join(ELEMENT_BYTES)}."
            )
        if len(self.shape) > MAX_DIMENSIONS or any(extent < 0 for extent in self.shape):
            raise MessageError(f"the shape {self.shape} is not valid for an array.")
        if math.prod(self.shape) * size != len(self.data):
            raise MessageError(
                f"an array of type {self.dtype} and shape {self.shape} needs "
                f"{math.prod(self.shape) * size} bytes, but its data has {len(self.data)}."
            )

    @classmethod
    def of(cls, exposing: object) -> NDArray:
        """Return a copy of an object that exposes its memory.

        Raises TypeError if the object does not expose its memory, and MessageError if its elements
        have a type that is not in ELEMENT_BYTES.
        """
        memory = memoryview(exposing)  # type: ignore[arg-type]  # raises TypeError
        dtype = _DTYPES.get(memory.format)
        if dtype is None or ELEMENT_BYTES[dtype] != memory.itemsize:
            raise MessageError(f"elements of format {memory.format!r} cannot be sent.")
        return cls(dtype, tuple(memory.shape or ()), memory.tobytes())

    def memory(self) -> memoryview:
        """Return the elements in their shape, read-only, for example for `numpy.asarray`.

        16-bit floats and fp8 are returned as bytes, in one dimension.
        """
        form = _FORMATS.get(self.dtype)
        flat = memoryview(self.data)
        if form is None or not self.data:
            return flat
        return flat.cast(form, self.shape)  # type: ignore[call-overload,no-any-return]
