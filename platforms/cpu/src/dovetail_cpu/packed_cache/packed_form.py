"""What a linear method must offer so that its packed weights can be kept: bytes out, bytes in."""

from __future__ import annotations

from typing import Protocol

from torch import nn

PACKED_FORM = "packed_form"
"""Capability id of linear methods that are `HasPackedForm`; declared in `provides`."""


class HasPackedForm(Protocol):
    """Capability "packed_form": the packed weights of a layer are bytes and nothing else.

    Biases stay parameters, and are loaded as ever.
    """

    def packed_format(self) -> str:
        """Return all that the packed bytes depend on beside the weights: form, version, options."""

    def packed_bytes(self, layer: nn.Module) -> int:
        """Return the bytes of the layer's packed weights, packed already or not; 0 for none."""

    def packed_form(self, layer: nn.Module) -> memoryview:
        """Return the packed weights, after `pack`: read-only, valid as long as it is held."""

    def restore(self, layer: nn.Module, form: memoryview) -> None:
        """Take the packed weights from `form`, which begins on a page's boundary, and keep it.

        Before weights are loaded: marks them as settled on the layer. `pack` comes all the same,
        and has only to let go of the plain weight. The form is not written to.
        """
