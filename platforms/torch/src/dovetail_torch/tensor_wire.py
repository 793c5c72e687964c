"""Conversion between tensors and the arrays that are sent between processes.

Used for `collective_rpc` with tensors as arguments or results: the core uses no tensor library; it
sends the name of the element type and the bytes of an array.
"""

from __future__ import annotations

import ctypes

import torch

from dovetail.errors import MessageError
from dovetail.transport.ndarray import NDArray

_DTYPES = {
    "bool": torch.bool,
    "uint8": torch.uint8,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def pack_tensor(tensor: torch.Tensor) -> NDArray:
    """Return a copy of a dense tensor on any device. Raise MessageError for unknown dtypes."""
    name = _NAMES.get(tensor.dtype)
    if name is None:
        raise MessageError(f"a tensor of type {tensor.dtype} cannot be sent to another process.")
    # The copy is on the host and contiguous, for any layout of the original.
    host = torch.empty(tensor.shape, dtype=tensor.dtype)
    host.copy_(tensor.detach())
    return NDArray(name, tuple(host.shape), ctypes.string_at(host.data_ptr(), host.nbytes))


def unpack_tensor(array: NDArray, device: torch.device | None = None) -> torch.Tensor:
    """Return an array as a tensor on `device`. None means the host."""
    dtype = _DTYPES[array.dtype]
    if not array.data:
        return torch.empty(array.shape, dtype=dtype, device=device)
    flat = torch.frombuffer(bytearray(array.data), dtype=torch.uint8)
    return flat.view(dtype).reshape(array.shape).to(device)
