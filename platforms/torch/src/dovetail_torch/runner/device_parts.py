"""What a platform brings to the runner beside tensors; what it does not bring is torch's."""

from __future__ import annotations

from dataclasses import dataclass

from dovetail_torch.graph_provider import GraphProvider
from dovetail_torch.sampling.blocks import best_tokens
from dovetail_torch.sampling.sampler import BestTokens


@dataclass(frozen=True, kw_only=True)
class DeviceParts:
    """best_tokens: the op provider's. graph_provider: None to run every step eagerly."""

    best_tokens: BestTokens = best_tokens
    graph_provider: GraphProvider | None = None


TORCH_PARTS = DeviceParts()
