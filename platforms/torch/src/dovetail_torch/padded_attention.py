"""Attention with a head size that the backend does not support: heads are padded with zeros.

Zeros appended to a query and a key do not change their product; zeros appended to a value give
zeros, which are then removed. So the results do not change, and the backend's guarantees hold.
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

    def __init__(self, layer: AttentionLayer, num_added: int, *, pads_values: bool = True) -> None:
        """num_added: number of features that are added to each head.

        pads_values: False if the values are parts of the keys.
        """
        self._layer = layer
        self._padding = (0, num_added)
        self._pads_values = pads_values

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
        q, k = pad(q_THD, self._padding), pad(k_TKD, self._padding)
        if not self._pads_values:
            v_TKD = k[..., : v_TKD.shape[-1]]
            self._layer.forward(q, k, v_TKD, kv_cache, metadata, out_THD)
            return
        v = pad(v_TKD, self._padding)
        out = q.new_empty(q.shape)
        self._layer.forward(q, k, v, kv_cache, metadata, out)
        out_THD.copy_(out[..., : out_THD.shape[-1]])
