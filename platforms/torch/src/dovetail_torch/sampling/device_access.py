"""How the sampler sends numbers to its device, and whether it may wait for the device.

This module does not depend on a device; the code that creates a sampler selects the access.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from numpy.typing import NDArray

from dovetail.interfaces.ops import DrawColumns

Upload = Callable[[NDArray], torch.Tensor]
"""A function that copies an array to a tensor on the device, of the same shape and dtype."""

DrawTokens = Callable[[torch.Tensor, DrawColumns], torch.Tensor]
"""The function `Draws.draw_tokens` of the op provider."""


@dataclass(frozen=True, kw_only=True)
class DeviceAccess:
    """upload: sends the host's numbers to the device.

    may_wait: whether a step may read a number from the device, which waits for all earlier work.
    draw_tokens: function of the op provider; None for torch operations.
    """

    upload: Upload
    may_wait: bool = True
    draw_tokens: DrawTokens | None = None


def plain_access(device: torch.device, draw_tokens: DrawTokens | None = None) -> DeviceAccess:
    """Return the access to a device that is synchronous or that the sampler may wait for."""
    return DeviceAccess(
        upload=lambda numbers: torch.from_numpy(numbers).to(device), draw_tokens=draw_tokens
    )
