"""The CPU's provider of graphs: the native operations of a run, recorded once, without Python then.

A run is recorded while torch's own operations are watched: allocations are given memory that stays
where it is, views are let pass, and any other operation means that a replay would leave something
out, so that there is none. Knows the shape of no model.
Memory: one arena of ARENA_BYTES for all recordings and for steps that are not recorded, taken as it
is used, and the operations' structs, below 64 KiB for a model of 40 layers and a size of batch.
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
"""A larger step computes so long that what Python does beside it does not count."""

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
        """Return the number of tokens, and whether head and choice of tokens are part of it.

        How many requests share the tokens stands in the attention's metadata, not in a recording.
        """
        if descriptor.num_tokens > MAX_TOKENS:
            return None
        return descriptor.num_tokens, descriptor.uniform, descriptor.greedy

    def run(self, forward: Forward) -> tuple[torch.Tensor, ...]:
        """Run `forward` with what it allocates in the arena.

        Memory that the allocator gives back to the system comes again page by page, in the middle
        of a kernel.
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
            return Capture(outputs=outputs, obstacle=f"the operation {watch.foreign}")
        if watch.is_full:
            room = ARENA_BYTES >> 20
            obstacle = f"what it computes on its way takes more than {room} MiB"
            return Capture(outputs=outputs, obstacle=obstacle, lasting=False)
        return Capture(outputs=outputs, graph=recording)


class _Lending(TorchDispatchMode):
    """Sees torch's operations, and gives new tensors the arena's memory, while there is any.

    is_full: whether there was none left.
    """

    def __init__(self, lease: ArenaLease) -> None:
        super().__init__()
        self._lease = lease
        self.is_full = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else torch imports its compiler, which takes a second, to keep it away from here.
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Do the operation, in the arena's memory where it allocates."""
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
    """Looks for what a recording would not have. foreign: the first such operation, or ""."""

    def __init__(self, lease: ArenaLease) -> None:
        super().__init__(lease)
        self.foreign = ""

    def _do(self, func: Any, args: Sequence[Any], keywords: dict[str, Any]) -> Any:
        with self:
            # What is made of other operations is judged by those: reshaping may copy, or not.
            parts = func.decompose(*args, **keywords)
        if parts is not NotImplemented:
            return parts
        if not (func.is_view or func is _aten._unsafe_view.default):
            self.foreign = self.foreign or func.name()
        return func(*args, **keywords)
