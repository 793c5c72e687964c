"""Captures and replays graphs of a device whose torch module has CUDA graphs (CUDA, ROCm).

This module implements `dovetail_torch.graphs.capture.GraphCapture`. All graphs share one memory
pool, as only one step runs at a time, and the graphs of a step are replayed in the order of their
captures.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from dovetail_torch.graphs.capture import ReplayableGraph

_THIS_THREAD = "thread_local"
"""Capture error mode: functions that are unsafe during a capture fail only in this thread.

Other threads may still call them, for example to wait for events.
"""


class AcceleratorGraphs:
    """Graphs of the current device. Used by one thread."""

    def __init__(self, module: Any) -> None:
        """module: the device's torch module, after `activate`."""
        self._module = module
        self._pool = module.graph_pool_handle()
        self._stream = module.Stream()
        self._open: Any = None

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Prepare captures, which are allowed in the block only. Wait for earlier work.

        The block runs on the stream of the captures. Python's garbage collector is off,
        because freeing a device object may wait for the device.
        """
        module = self._module
        module.synchronize()
        gc.collect()
        # `gc.unfreeze` would also undo a `gc.freeze` that the program has called.
        freezes = not gc.get_freeze_count()
        if freezes:
            gc.freeze()
        collects = gc.isenabled()
        gc.disable()
        self._stream.wait_stream(module.current_stream())
        try:
            with module.stream(self._stream):
                yield
        finally:
            self._abandon()
            if collects:
                gc.enable()
            if freezes:
                gc.unfreeze()
            module.current_stream().wait_stream(self._stream)

    def begin(self) -> None:
        """Begin a graph. Operations are recorded until `end` and are not executed."""
        self._open = self._module.CUDAGraph()
        self._open.capture_begin(pool=self._pool, capture_error_mode=_THIS_THREAD)

    def end(self) -> ReplayableGraph:
        """Return the graph of the operations since `begin`. Raise RuntimeError if it is invalid."""
        graph, self._open = self._open, None
        graph.capture_end()
        replayable: ReplayableGraph = graph
        return replayable

    def memory_bytes(self) -> int:
        """Return the memory that torch has reserved on the device, in bytes."""
        return int(self._module.memory_reserved())

    def _abandon(self) -> None:
        """End a capture that an error has interrupted."""
        graph, self._open = self._open, None
        if graph is not None:
            with suppress(RuntimeError):
                graph.capture_end()
