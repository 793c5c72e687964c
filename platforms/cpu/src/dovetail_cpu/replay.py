"""The CPU's graph provider: records the native operations of a step once, then replays them.

While a step is recorded, torch operations are intercepted: allocations get memory at fixed
addresses, views are allowed, and any other operation makes the recorded step unusable, because a
replay would skip it. This module does not depend on a model's shape. Memory: one arena of
ARENA_BYTES for all recorded steps and for steps that are not recorded, allocated when it is used,
and the argument structs of the operations, below 64 KiB for a model of 40 layers and one batch
size.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dovetail_cpu.activation_arena import ActivationArena, ArenaLease
from dovetail_cpu_kernels.recording import Recording
from dovetail_torch.graph_provider import BatchDescriptor, Capture, Forward

ARENA_BYTES = 256 << 20
MAX_TOKENS = 256
"""Maximum number of tokens; for larger steps the Python overhead is negligible."""

_aten = torch.ops.aten
_ALLOCATIONS = frozenset(
    {
        _aten.empty.memory_format,
        _aten.empty_like.default,
        _aten.empty_strided.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
    }
)


class ReplayProvider:
    """Implements `dovetail_torch.graph_provider.GraphProvider`."""

    def __init__(self) -> None:
        self._arena = ActivationArena(ARENA_BYTES)

    def key(self, descriptor: BatchDescriptor) -> Hashable | None:
        """Return the number of tokens, and whether the LM head and sampling are part of the step.

        The number of requests is not part of the key, because replays read it from the attention
        metadata.
        """
        if descriptor.num_tokens > MAX_TOKENS:
            return None
        return descriptor.num_tokens, descriptor.uniform, descriptor.greedy

    def run(self, forward: Forward) -> tuple[torch.Tensor, ...]:
        """Run `forward` with its allocations in the arena.

        Memory that the allocator returns to the system would cause page faults in the middle of a
        kernel.
        """
        with _Lending(ArenaLease(self._arena)):
            return forward()

    def capture(self, forward: Forward) -> Capture:
        """Run `forward` and record it."""
        watch = _Watch(ArenaLease(self._arena))
        recording = Recording()
        with recording, watch:
            outputs = forward()
        if watch.foreign:
            return Capture(outputs=outputs, failure_reason=f"the operation {watch.foreign}")
        if watch.is_full:
            room = ARENA_BYTES >> 20
            failure_reason = f"the batch's activations need more than {room} MiB"
            return Capture(outputs=outputs, failure_reason=failure_reason, permanent=False)
        return Capture(outputs=outputs, graph=recording)


class _Lending(TorchDispatchMode):
    """Intercepts torch operations and allocates new tensors in the arena until it is full.

    is_full: whether an allocation did not fit into the arena.
    """

    def __init__(self, lease: ArenaLease) -> None:
        super().__init__()
        self._lease = lease
        self.is_full = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Without this, torch imports its compiler, which takes a second.
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operation. If it allocates memory, use the arena."""
        keywords = dict(kwargs or {})
        if func in _ALLOCATIONS:
            return self._allocate(func, args, keywords)
        return self._do(func, args, keywords)

    def _do(self, func: Any, args: Sequence[Any], keywords: dict[str, Any]) -> Any:
        return func(*args, **keywords)

    def _allocate(
        self, func: Callable[..., torch.Tensor], args: Sequence[Any], keywords: dict[str, Any]
    ) -> torch.Tensor:
        like = func(*args, **{**keywords, "device": "meta"})
        num_bytes = like.untyped_storage().nbytes()
        block = self._lease.take(num_bytes) if num_bytes else None
        if block is None:
            self.is_full = self.is_full or num_bytes > 0
            return func(*args, **keywords)
        return block.view(like.dtype).as_strided(like.shape, like.stride())


class _Watch(_Lending):
    """Detects operations that a recorded step would miss.

    foreign: the name of the first such operation, or "" if there was none.
    """

    def __init__(self, lease: ArenaLease) -> None:
        super().__init__(lease)
        self.foreign = ""

    def _do(self, func: Any, args: Sequence[Any], keywords: dict[str, Any]) -> Any:
        with self:
            # The parts of a composite operation are checked instead: reshape copies in some cases
            # only.
            parts = func.decompose(*args, **keywords)
        if parts is not NotImplemented:
            return parts
        if not (func.is_view or func is _aten._unsafe_view.default):
            self.foreign = self.foreign or func.name()
        return func(*args, **keywords)
