"""Attention with explicit float32 scores, for what torch does not support: soft caps, sinks, ALiBi.

This module does not depend on the cache or on requests.

Dimensions: H query heads, D head size; G requests, Q query tokens per request and head, Y query
heads per key-value head, L positions, X query or key-value heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dovetail_attn_torch.metadata import GatheredBatch, visible

# Maximum number of scores in memory at a time, in float32: 16 MiB.
MAX_SCORES = 1 << 22


@dataclass(frozen=True, kw_only=True)
class ExplicitAttention:
    """Computes softmax(c · tanh(scale · q · k / c) + bias, sink) · v, omitting the sink's weight.

    soft_cap: c; 0 for none (Gemma 2, arXiv:2408.00118).
    sinks_H: float32, or None (Xiao et al. 2023, arXiv:2309.17453).
    slopes_H: float32, or None; the bias is slope · (position of the key - position of the query)
    (Press et al. 2022, arXiv:2108.12409).
    """

    scale: float
    soft_cap: float
    sinks_H: torch.Tensor | None
    slopes_H: torch.Tensor | None = None

    def __call__(
        self,
        q_GXQD: torch.Tensor,
        k_GXLD: torch.Tensor,
        v_GXLD: torch.Tensor,
        batch: GatheredBatch | None,
    ) -> torch.Tensor:
        """Return the outputs, in the dtype of q, with the heads of q and the features of v.

        The dimensions X and Q of q are either heads and tokens, or key-value heads and query heads.
        Query tokens are processed in tiles, so that the scores stay within `MAX_SCORES`.
        """
        num_rows, num_heads, query_len, _ = q_GXQD.shape
        num_kv_heads, length = k_GXLD.shape[1:3]
        k_GXLD, v_GXLD = k_GXLD.float(), v_GXLD.float()
        mask_G1QL = None if batch is None else batch.mask_G1QL
        positions_L = torch.arange(length, device=q_GXQD.device)
        positions_GL = positions_L.unsqueeze(0) if batch is None else batch.positions_GL
        seen_from_GQ = positions_GL if batch is None else batch.query_positions_GQ
        out_GXQD = q_GXQD.new_empty((*q_GXQD.shape[:-1], v_GXLD.shape[-1]))
        tile = max(1, MAX_SCORES // (num_rows * num_heads * length))
        for start in range(0, query_len, tile):
            end = min(start + tile, query_len)
            q_GXYQD = q_GXQD[:, :, start:end].float().unflatten(1, (num_kv_heads, -1))
            scores = q_GXYQD.flatten(2, 3).mul(self.scale) @ k_GXLD.transpose(2, 3)
            if self.soft_cap:
                scores = scores.div_(self.soft_cap).tanh_().mul_(self.soft_cap)
            scores = scores.unflatten(2, q_GXYQD.shape[2:4])
            if self.slopes_H is not None:
                # All query heads of a decode, in the dimension Q, have the same position.
                seen_from_GQ = seen_from_GQ.expand(-1, query_len)
                distance_GQL = positions_GL.unsqueeze(1) - seen_from_GQ[:, start:end].unsqueeze(2)
                slopes_XYQ1 = _by_query(self.slopes_H, scores.shape, start, query_len)
                scores += slopes_XYQ1 * distance_GQL[:, None, None]
            if mask_G1QL is not None:
                mask_G1QL = mask_G1QL.expand(-1, -1, query_len, -1)
                scores += mask_G1QL[:, :, start:end].unsqueeze(2)
            elif batch is None:
                seen_QL = visible(positions_L[start:end].unsqueeze(1), positions_L, 0)
                scores.masked_fill_(seen_QL.logical_not_(), float("-inf"))
            out = self._weights(scores, start, query_len).flatten(2, 3) @ v_GXLD
            out_GXQD[:, :, start:end] = out.unflatten(2, q_GXYQD.shape[2:4]).flatten(1, 2)
        return out_GXQD

    def _weights(self, scores_GXYQL: torch.Tensor, start: int, query_len: int) -> torch.Tensor:
        """Return the softmax of the scores and sinks. The first query has the index `start`."""
        if self.sinks_H is None:
            return scores_GXYQL.softmax(-1)
        num_rows, length = scores_GXYQL.shape[0], scores_GXYQL.shape[-1]
        sinks_XYQ1 = _by_query(self.sinks_H, scores_GXYQL.shape, start, query_len)
        sinks_GXYQ1 = sinks_XYQ1.expand(num_rows, -1, -1, -1, -1)
        return torch.cat([scores_GXYQL, sinks_GXYQ1], -1).softmax(-1)[..., :length]


def _by_query(
    values_H: torch.Tensor, scores_shape: torch.Size, start: int, query_len: int
) -> torch.Tensor:
    """Return each query head's value, [X, Y, Q, 1], to broadcast over scores [G, X, Y, Q, L].

    start: the index of the first of these Q queries among all `query_len` queries.
    """
    _, num_kv_heads, group, num_queries, _ = scores_shape
    values_XQ = values_H.view(num_kv_heads * group, -1).expand(-1, query_len)
    values_XQ = values_XQ[:, start : start + num_queries]
    return values_XQ.unflatten(0, (num_kv_heads, group)).unsqueeze(-1)
