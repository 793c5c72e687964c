"""Rotary position embedding: a table of cosines and sines, applied by the context's ops.

Dimensions: T tokens, H query heads, K key-value heads, S head size, P positions, R rotary_dim,
F half of rotary_dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dovetail.errors import ModelError
from dovetail.interfaces.attention import RotaryArgs
from dovetail.interfaces.model import ModelContext
from dovetail_torch.layers.rope_frequencies import read_rope_parameters, rope_frequencies
from dovetail_torch.lazy_memory import is_host_memory, lazy_zeros

_POSITIONS_AT_ONCE = 4096
"""Number of positions that are filled at a time; shorter tables are filled at startup."""


class RotaryEmbedding(nn.Module):
    """Rotates queries and keys by their positions. One instance serves all layers of a model.

    cos_sin_PR: float32 [max_model_len, rotary_dim], first cosines, then sines; not persistent.
    Positions must be below max_model_len. Raises ModelError for an unsupported config.

    A long table in host memory is filled as positions are used. Its address never changes. A
    runner that calls `grow` before each step that needs more sets `grows_ahead`; otherwise the
    whole table is filled in the first forward pass.
    """

    def __init__(
        self,
        context: ModelContext,
        head_size: int,
        *,
        rotary_dim: int | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        """rotary_dim: number of leading features per head to rotate. None to read the config.

        parameters: as returned by `read_rope_parameters`. None to read the config.
        """
        super().__init__()
        self.ops = context.ops
        if parameters is None:
            parameters = read_rope_parameters(context.hf_config)
        parameters = {**parameters, "max_model_len": context.max_model_len}
        if rotary_dim is None:
            rotary_dim = int(head_size * parameters["partial_rotary_factor"])
        if rotary_dim % 2 or not 0 < rotary_dim <= head_size:
            raise ModelError(
                f"rotary_dim={rotary_dim} is invalid for head_dim={head_size}: it must be even, "
                "positive and at most head_dim; see partial_rotary_factor in config.json"
            )
        self._frequency_F, self._factor = rope_frequencies(parameters, rotary_dim)
        self.grows_ahead = False
        self._num_ready, self.num_positions = 0, context.max_model_len
        cos_sin_PR = lazy_zeros((self.num_positions, rotary_dim), torch.float32, context.device)
        self.cos_sin_PR: torch.Tensor
        self.register_buffer("cos_sin_PR", cos_sin_PR, persistent=False)
        can_wait = self.num_positions > _POSITIONS_AT_ONCE and is_host_memory(context.device)
        self.grow(_POSITIONS_AT_ONCE if can_wait else self.num_positions)

    @torch.inference_mode()
    def grow(self, num_positions: int) -> int:
        """Fill the table for at least `num_positions`. Return the number of filled positions."""
        num_rows = min(num_positions, self.num_positions)
        while self._num_ready < num_rows:
            start = self._num_ready
            end = min(start + _POSITIONS_AT_ONCE, self.num_positions)
            # float32 throughout, as in training: float64 gives other angles at large positions.
            position_P1 = torch.arange(start, end, dtype=torch.float32)[:, None]
            angle_PF = position_P1 * self._frequency_F
            cos_sin_PR = torch.cat((angle_PF.cos(), angle_PF.sin()), dim=-1) * self._factor
            self.cos_sin_PR[start:end].copy_(cos_sin_PR)
            self._num_ready = end
        return self._num_ready

    def at(self, positions_T: torch.Tensor) -> RotaryArgs:
        """Return the rotation by these positions, int64 [T], for an attention layer to apply."""
        if not self.grows_ahead and self._num_ready < self.num_positions:
            self.grow(self.num_positions)
        return RotaryArgs(ops=self.ops, positions_T=positions_T, cos_sin_PR=self.cos_sin_PR)

    def forward(
        self, q_THS: torch.Tensor, k_TKS: torch.Tensor, positions_T: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return q and k, rotated immediately. Positions are int64 [T]."""
        return self.at(positions_T).apply(q_THS, k_TKS)
