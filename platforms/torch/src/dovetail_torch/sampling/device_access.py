"""How the sampler uses its device: whether it may wait for it, and how numbers are sent to it.

Does not depend on a device; the creator of a sampler selects it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from numpy.typing import NDArray

from dovetail.interfaces.ops import DrawColumns

Upload = Callable[[NDArray], torch.Tensor]
"""Returns an array as a tensor on the device, of the same shape and dtype."""

DrawTokens = Callable[[torch.Tensor, DrawColumns], torch.Tensor]
"""As `Draws.draw_tokens`."""


@dataclass(frozen=True, kw_only=True)
class DeviceAccess:
    """upload: sends numbers of the host to the device.

    may_wait: whether a step may read a number from the device, and so wait for all earlier work.
    draw_tokens: of the op provider; None for torch operations.
    """

    upload: Upload
    may_wait: bool = True
    draw_tokens: DrawTokens | None = None


def plain_access(device: torch.device, draw_tokens: DrawTokens | None = None) -> DeviceAccess:
    """Return the access to a device that is synchronous, or that may be waited for."""
    return DeviceAccess(
        upload=lambda numbers: torch.from_numpy(numbers).to(device), draw_tokens=draw_tokens
    )
