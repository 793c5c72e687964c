"""Counts the bytes and FLOPs of Triton kernels in Triton's interpreter, as a model of a device.

The counts are exact for the code and its inputs, but they do not measure time. "Requested" bytes
are those of all loads and stores of all programs; an address that several lanes of one load share
counts once. "Moved" bytes count each address once per launch for loads and once for stores, as if
the caches of a device kept everything that a kernel reads twice. This module needs a process with
TRITON_INTERPRET=1. Triton, and numpy, which its interpreter needs, are imported within functions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any
from unittest.mock import patch


@dataclass
class Traffic:
    """Totals over the launches in a `with` block. flops: 2 for each multiply-add of `tl.dot`."""

    requested_bytes: int = 0
    moved_bytes: int = 0
    flops: int = 0
    launches: int = 0


@dataclass
class _Launch:
    """Addresses of one launch, by direction and element size, in pieces."""

    pieces: dict[tuple[str, int], list[Any]] = field(default_factory=dict)

    def add(self, direction: str, addresses: Any, size: int) -> int:
        """Add the addresses of one operation. Return its requested bytes."""
        distinct = _numpy().unique(addresses)
        self.pieces.setdefault((direction, size), []).append(distinct)
        return int(distinct.size) * size

    def moved_bytes(self) -> int:
        """Return the bytes of all distinct addresses, for loads and for stores."""
        np = _numpy()
        return sum(
            int(np.unique(np.concatenate(pieces)).size) * size
            for (_, size), pieces in self.pieces.items()
        )


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Count the traffic and FLOPs of all kernels that are launched in the `with` block."""
    interpreter: Any = import_module("triton.runtime.interpreter")
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    masked_load, masked_store = builder.create_masked_load, builder.create_masked_store
    dot, run = builder.create_dot, executor.__call__
    traffic, launch = Traffic(), _Launch()

    def load(self: Any, ptrs: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        traffic.requested_bytes += launch.add("load", *_seen(ptrs, mask))
        return masked_load(self, ptrs, mask, *args, **kwargs)

    def store(self: Any, ptrs: Any, value: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        traffic.requested_bytes += launch.add("store", *_seen(ptrs, mask))
        return masked_store(self, ptrs, value, mask, *args, **kwargs)

    def multiply(self: Any, a: Any, b: Any, *args: Any, **kwargs: Any) -> Any:
        *batch, rows, depth = a.data.shape
        traffic.flops += 2 * math.prod(batch) * rows * depth * b.data.shape[-1]
        return dot(self, a, b, *args, **kwargs)

    def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
        launch.pieces.clear()
        result = run(self, *args, **kwargs)
        traffic.moved_bytes += launch.moved_bytes()
        traffic.launches += 1
        return result

    with (
        patch.object(builder, "create_masked_load", load),
        patch.object(builder, "create_masked_store", store),
        patch.object(builder, "create_dot", multiply),
        patch.object(executor, "__call__", launched),
    ):
        yield traffic


def _seen(ptrs: Any, mask: Any) -> tuple[Any, int]:
    """Return the addresses of the active lanes, and the size of an element in bytes."""
    size = max(ptrs.get_element_ty().primitive_bitwidth // 8, 1)
    # A mask that is a conjunction with a number consists of integers, not of bools.
    active = _numpy().broadcast_to(mask.data, ptrs.data.shape).astype(bool)
    return ptrs.data[active], size


def _numpy() -> Any:
    return import_module("numpy")
