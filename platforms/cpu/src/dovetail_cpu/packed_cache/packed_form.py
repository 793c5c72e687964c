"""The interface of linear methods that export and import packed weights as bytes, for a cache."""

from __future__ import annotations

from typing import Protocol

from torch import nn

PACKED_FORM = "packed_form"
"""Capability id of linear methods that implement `HasPackedForm`; declared in `provides`."""


class HasPackedForm(Protocol):
    """Capability "packed_form": the packed weights of a layer are plain bytes.

    Biases stay parameters and are loaded as usual.
    """

    def packed_format(self) -> str:
        """Return a key of all inputs of packing except the weights: format, version, options."""

    def packed_bytes(self, layer: nn.Module) -> int:
        """Return the size of the layer's packed weights, also before packing.

        Returns 0 if the layer is not packed.
        """

    def packed_form(self, layer: nn.Module) -> memoryview:
        """Return the packed weights, after `pack`: read-only, valid as long as the view exists."""

    def restore(self, layer: nn.Module, form: memoryview) -> None:
        """Use the packed weights in `form`, which is aligned to a page, and keep a reference to it.

        Called before weights are loaded; marks the weights of the layer as loaded. `pack` is still
        called; it only frees the unpacked weight. `form` is never written.
        """
