"""The interface of loaders that provide quantized blocks, for workers with a packed cache.

The size of packed weights depends on the types of the blocks, and a cache needs this size before
loading.
"""

from __future__ import annotations

from typing import Protocol

from torch import nn

BLOCK_PLAN = "block_plan"
"""Capability id of loaders that implement `PlansBlocks`; declared in `provides`."""


class PlansBlocks(Protocol):
    """Capability "block_plan": the loader knows the types of blocks without reading weights."""

    def plan(self, model: nn.Module) -> None:
        """Announce to the linear layers which parts `load` will provide as blocks."""
