"""Attention with a head size that the backend does not support: heads are padded with zeros.

Zeros appended to a query and a key do not change their product; zeros appended to a value give
zeros, which are cut off. So the results do not change, and the backend's guarantees hold.
Dimensions: T tokens, H query heads, K key-value heads, D head size of the model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

from dovetail.interfaces import AttentionLayer, RotaryArgs


class PaddedAttention(AttentionLayer):
    """Calls a backend's layer of larger heads with the model's heads.

    Does not apply rotary embedding.
    """

    def __init__(self, layer: AttentionLayer, num_added: int) -> None:
        """num_added: number of features that are added to each head."""
        self._layer = layer
        self._padding = (0, num_added)

    def forward(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: Any,
        out_THD: torch.Tensor,
        rotary_args: RotaryArgs | None = None,
    ) -> None:
        """Compute attention with padded heads. `kv_cache` has the larger heads."""
        q, k, v = (pad(x, self._padding) for x in (q_THD, k_TKD, v_TKD))
        out = q.new_empty(q.shape)
        self._layer.forward(q, k, v, kv_cache, metadata, out)
        out_THD.copy_(out[..., : out_THD.shape[-1]])
