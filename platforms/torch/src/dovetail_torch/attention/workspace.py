"""Memory for intermediate attention results, which all metadata builders of a worker share.

Layers run one after another, so the results of one layer may overwrite those of another.
"""

from __future__ import annotations

import torch


class AttentionWorkspace:
    """Memory on one device, allocated at the first request."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: torch.Tensor | None = None

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return at least `num_bytes` bytes, uint8. They are zero before their first use.

        A request for more memory than before allocates new memory; earlier results stay valid.
        """
        if self._memory is None or self._memory.numel() < num_bytes:
            # Not an inference tensor: a later step may run outside of inference mode.
            with torch.inference_mode(False):
                self._memory = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        return self._memory
