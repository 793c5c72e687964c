"""A fake weight loader that computes weights from their names.

torch is imported within functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from zlib import crc32

from dovetail.interfaces.weight_loader import WeightLoader, WeightLoaderContext

if TYPE_CHECKING:
    import torch
    from torch import nn

STANDARD_DEVIATION = 0.3


class FakeWeightLoader(WeightLoader):
    """Fills each parameter with normally distributed values, seeded by the parameter's name.

    Vectors have mean 1, other weights mean 0; integer weights become 0. Then layers convert their
    weights (`converts`), as after any loader.
    """

    def __init__(self, context: WeightLoaderContext) -> None:
        self._seed = context.seed

    def load(self, model: nn.Module) -> int:
        """Fill all parameters and persistent buffers in place. Return 0 bytes read."""
        import torch

        with torch.no_grad():
            # A tensor with two names has two entries in state_dict, but is written once.
            by_id = {id(t): (n, t) for n, t in model.state_dict(keep_vars=True).items()}
            for name, tensor in by_id.values():
                self.fill(name, tensor)
            for layer in model.modules():
                for leaf, convert in getattr(layer, "converts", {}).items():
                    convert(getattr(layer, leaf))
        return 0

    def fill(self, name: str, tensor: torch.Tensor) -> None:
        """Write one weight."""
        import torch

        generator = torch.Generator().manual_seed(crc32(name.encode()) + self._seed)
        values = torch.randn(tensor.shape, generator=generator) * STANDARD_DEVIATION
        if not tensor.is_floating_point():
            values = torch.zeros(tensor.shape)
        tensor.copy_(values + 1 if tensor.ndim == 1 else values)
