"""The tokens of each expert, and the sum of the experts' outputs, with torch operations.

On the CPU the tokens are sorted by expert, and each expert computes only its own tokens. Elsewhere,
and while torch traces the model, the number of tokens of an expert is not known without waiting for
the device, so that every expert computes all tokens. In both cases no token is dropped, and a
token's outputs are added in a fixed order, so that a token does not depend on other tokens. (The
rounding of torch's matrix products may depend on the number of rows.) Dimensions: T tokens, D
hidden size, E experts, K experts per token, G gate and up features, I intermediate features, N
tokens of an expert.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch.nn import functional

from dovetail.interfaces.ops import ExpertRouting, ExpertWeights, RouterWeights
from dovetail_torch.lazy_memory import is_host_memory


class TokenGroups(ABC):
    """Yields each expert with its rows, [N, D]; `put` takes the outputs, `total` adds them."""

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield index and rows of each expert that has tokens, in ascending order."""

    @abstractmethod
    def put(self, expert: int, y_ND: torch.Tensor) -> None:
        """Store the outputs of an expert."""

    @abstractmethod
    def total(self) -> torch.Tensor:
        """Return the weighted sum of each token's outputs, [T, D], in the dtype of the rows."""


class _SortedGroups(TokenGroups):
    """Each expert gets its own tokens. Outputs are added in the order of the selection."""

    def __init__(
        self, x_TD: torch.Tensor, experts_TK: torch.Tensor, weights_TK: torch.Tensor, num: int
    ) -> None:
        flat = experts_TK.flatten()
        self._order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=num).tolist()
        self._rows = x_TD[self._order // experts_TK.shape[1]].split(counts)
        self._weights_TK = weights_TK
        self._outputs = torch.empty(
            (len(flat), x_TD.shape[1]), dtype=x_TD.dtype, device=x_TD.device
        )
        self._slots = self._order.split(counts)

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield index and rows of each expert that has tokens."""
        for expert, rows_ND in enumerate(self._rows):
            if len(rows_ND):
                yield expert, rows_ND

    def put(self, expert: int, y_ND: torch.Tensor) -> None:
        """Store the outputs at the positions of the tokens."""
        self._outputs[self._slots[expert]] = y_ND

    def total(self) -> torch.Tensor:
        """Return the weighted sum of the outputs, computed in float32."""
        y_TKD = self._outputs.view(*self._weights_TK.shape, -1).float()
        return (y_TKD * self._weights_TK[..., None]).sum(1).to(self._outputs.dtype)


class _AllTokens(TokenGroups):
    """Each expert gets all tokens, with the weight 0 for those that did not select it."""

    def __init__(
        self, x_TD: torch.Tensor, experts_TK: torch.Tensor, weights_TK: torch.Tensor, num: int
    ) -> None:
        self._x_TD, self._num = x_TD, num
        self._experts_TK, self._weights_TK = experts_TK, weights_TK
        self._sum_TD = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield all rows for each expert."""
        for expert in range(self._num):
            yield expert, self._x_TD

    def put(self, expert: int, y_ND: torch.Tensor) -> None:
        """Add the outputs. An output that is not selected is not added, even if it is infinite."""
        selected_TK = self._experts_TK == expert
        weight_T1 = (self._weights_TK * selected_TK).sum(-1, keepdim=True)
        part_TD = torch.where(selected_TK.any(-1, keepdim=True), y_ND.float() * weight_T1, 0.0)
        self._sum_TD += part_TD

    def total(self) -> torch.Tensor:
        """Return the weighted sum of the outputs, computed in float32."""
        return self._sum_TD.to(self._x_TD.dtype)


def group_tokens(
    x_TD: torch.Tensor, experts_TK: torch.Tensor, weights_TK: torch.Tensor, num_experts: int
) -> TokenGroups:
    """Return the tokens of each expert."""
    is_sorted = not torch.compiler.is_compiling() and is_host_memory(x_TD.device)
    kind = _SortedGroups if is_sorted else _AllTokens
    return kind(x_TD, experts_TK, weights_TK, num_experts)


def apply_experts(
    x_TD: torch.Tensor, experts_TK: torch.Tensor, weights_TK: torch.Tensor, layer: ExpertWeights
) -> torch.Tensor:
    """Return the weighted sum of the outputs of each token's experts, [T, D]."""
    groups = group_tokens(x_TD, experts_TK, weights_TK, len(layer.gate_up_EGD))

    def row(bias: torch.Tensor | None, expert: int) -> torch.Tensor | None:
        return None if bias is None else bias[expert]

    for expert, rows_ND in groups:
        bias_G, bias_D = row(layer.gate_up_bias_EG, expert), row(layer.down_bias_ED, expert)
        gate_up_NG = functional.linear(rows_ND, layer.gate_up_EGD[expert], bias_G)
        inner_NI = activate(gate_up_NG, layer.limit, layer.alpha)
        groups.put(expert, functional.linear(inner_NI, layer.down_EDI[expert], bias_D))
    return groups.total()


def activate(gate_up_NG: torch.Tensor, limit: float, alpha: float) -> torch.Tensor:
    """Return the activations of an expert, [N, I]; see `ExpertWeights` for `limit` and `alpha`."""
    gate_NI, up_NI = gate_up_NG.chunk(2, dim=-1)
    if not limit:
        return functional.silu(gate_NI) * up_NI
    gate_NI, up_NI = gate_NI.clamp(max=limit), up_NI.clamp(-limit, limit)
    return gate_NI * torch.sigmoid(gate_NI * alpha) * (up_NI + 1)


def select_experts(
    x_TD: torch.Tensor, router: RouterWeights, routing: ExpertRouting
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts of each token, int64 [T, K], best first, and their weights, float32."""
    bias_E = None if router.bias_E is None else router.bias_E.float()
    logits_TE = functional.linear(x_TD.float(), router.weight_ED.float(), bias_E)
    scores_TE = logits_TE.sigmoid() if routing.scores == "sigmoid" else logits_TE.softmax(-1)
    rank_TE = scores_TE if router.correction_E is None else scores_TE + router.correction_E
    if routing.num_groups > 1:
        rank_TE = _keep_groups(rank_TE, routing, sums=router.correction_E is not None)
    experts_TK = rank_TE.topk(routing.top_k, dim=-1).indices
    weights_TK = scores_TE.gather(1, experts_TK)
    if routing.renormalize:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    return experts_TK, weights_TK * routing.scale


def _keep_groups(rank_TE: torch.Tensor, routing: ExpertRouting, *, sums: bool) -> torch.Tensor:
    """Return the ranks, with -inf for experts outside of each token's best groups."""
    groups = rank_TE.unflatten(1, (routing.num_groups, -1))
    best = groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(-1) if sums else groups.amax(-1)
    kept = torch.zeros_like(best, dtype=torch.bool)
    kept.scatter_(1, best.topk(routing.top_groups, dim=-1).indices, True)
    return groups.masked_fill(~kept[..., None], -torch.inf).flatten(1)
