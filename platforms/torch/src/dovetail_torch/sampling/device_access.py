"""How the sampler deals with its device: what it may ask of it, and how numbers get there.

Depends on no device; whoever makes a sampler knows.
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
    """upload: brings numbers of the host there.

    may_wait: whether a step may ask the device for a number, and so wait for all before it.
    draw_tokens: the op provider's; None for torch operations.
    """

    upload: Upload
    may_wait: bool = True
    draw_tokens: DrawTokens | None = None


def plain_access(device: torch.device, draw_tokens: DrawTokens | None = None) -> DeviceAccess:
    """Return the access to a device that computes as it is called, or may be waited for."""
    return DeviceAccess(
        upload=lambda numbers: torch.from_numpy(numbers).to(device), draw_tokens=draw_tokens
    )
