"""The conformance cases of `select_experts` and `fused_experts`, for providers that override them.

The references are loops over tokens in float64. torch is imported within functions.
Dimensions: T tokens, D hidden size, E experts, K experts per token, G gate and up features,
I intermediate features.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from dovetail.interfaces.ops import (
    ExpertRouting,
    ExpertWeights,
    Ops,
    RouterWeights,
    overridden_operations,
)
from dovetail_devkit.case import Case
from dovetail_devkit.comparison import exact, expect_close, random_tensor
from dovetail_devkit.expectation import expect

if TYPE_CHECKING:
    import torch

SLACK = 6.0
"""Factor for the tolerances of `fused_experts`, because the activations are also rounded."""
_WEIGHT_ERROR = 1e-5
_ROUTINGS = {
    "softmax": (ExpertRouting(top_k=3), False),
    "renormalized": (ExpertRouting(top_k=2, renormalize=True), False),
    "sigmoid, corrected": (
        ExpertRouting(top_k=3, scores="sigmoid", renormalize=True, scale=2.5),
        True,
    ),
    "groups": (
        ExpertRouting(top_k=3, scores="sigmoid", num_groups=4, top_groups=2, renormalize=True),
        True,
    ),
    "groups by best": (ExpertRouting(top_k=3, num_groups=4, top_groups=2, scale=1.5), False),
}
"""The routing of each case, and whether the router has a bias and a correction."""


@dataclass(frozen=True, kw_only=True)
class ExpertSizes:
    """A case of `fused_experts`.

    limit: see `ExpertWeights`; if it is set, the layers have biases.
    """

    tokens: int
    hidden: int
    inner: int
    experts: int
    top_k: int
    limit: float = 0.0


SIZES = {
    "one token": ExpertSizes(tokens=1, hidden=64, inner=48, experts=8, top_k=2),
    "tokens": ExpertSizes(tokens=37, hidden=40, inner=24, experts=5, top_k=3),
    "one expert of a token": ExpertSizes(tokens=9, hidden=33, inner=17, experts=3, top_k=1),
    "clamped, biases": ExpertSizes(tokens=7, hidden=32, inner=16, experts=4, top_k=2, limit=1.5),
}


def expert_cases(
    ops_cls: type[Ops], device: torch.device, *, dtypes: Iterable[str]
) -> Iterator[Case]:
    """Yield the cases of the operations that the class overrides."""
    overridden = overridden_operations(ops_cls)
    for dtype in dtypes:
        for name in _ROUTINGS if "select_experts" in overridden else ():
            run = partial(_check_routing, ops_cls, name, dtype, device)
            yield Case(name=f"select_experts, {name}, in {dtype}", run=run)
        for name, sizes in SIZES.items() if "fused_experts" in overridden else ():
            run = partial(_check_experts, ops_cls, sizes, dtype, device)
            yield Case(name=f"fused_experts, {name}, in {dtype}", run=run)


def _check_routing(ops_cls: type[Ops], name: str, dtype: str, device: torch.device) -> None:
    """Compare the selected experts and weights of many tokens with loops."""
    import torch

    routing, is_corrected = _ROUTINGS[name]
    num_tokens, hidden, num_experts = 23, 56, 12

    def values(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
        return random_tensor(shape, dtype=dtype, device=device, seed=seed, scale=scale)

    router = RouterWeights(
        weight_ED=values(num_experts, hidden, seed=1, scale=hidden**-0.5),
        bias_E=values(num_experts, seed=2) if is_corrected else None,
        correction_E=values(num_experts, seed=3).float() if is_corrected else None,
    )
    x_TD = values(num_tokens, hidden, seed=4)
    before = x_TD.clone()
    experts_TK, weights_TK = ops_cls().select_experts(x_TD, router, routing)
    expect(torch.equal(x_TD, before), "select_experts must not change its input")
    expect(experts_TK.dtype == torch.int64, f"experts have the dtype {experts_TK.dtype}, not int64")
    expect(weights_TK.dtype == torch.float32, f"weights have the dtype {weights_TK.dtype}")
    logits_TE = exact(x_TD) @ exact(router.weight_ED).T
    if router.bias_E is not None:
        logits_TE += exact(router.bias_E)
    for token, logits_E in enumerate(logits_TE):
        expected, weights = select(logits_E, router, routing)
        actual = experts_TK[token].tolist()
        expect(actual == expected, f"token {token} has the experts {actual}; expected {expected}")
        error = float((weights_TK[token].cpu().double() - weights).abs().max())
        expect(error <= _WEIGHT_ERROR, f"the weights of token {token} differ by {error:.2g}")


def select(
    logits_E: torch.Tensor, router: RouterWeights, routing: ExpertRouting
) -> tuple[list[int], torch.Tensor]:
    """Return the experts of one token, best first, and their weights, float64 [K]."""
    scores_E = logits_E.sigmoid() if routing.scores == "sigmoid" else logits_E.softmax(0)
    corrected = router.correction_E is not None
    ranks = (scores_E + exact(router.correction_E) if corrected else scores_E).tolist()
    size = len(ranks) // routing.num_groups
    groups = [range(first, first + size) for first in range(0, len(ranks), size)]

    def worth(group: range) -> float:
        best_first = sorted((float(ranks[e]) for e in group), reverse=True)
        return sum(best_first[: 2 if corrected else 1])

    kept = sorted(groups, key=worth, reverse=True)[: routing.top_groups]
    allowed = [expert for group in kept for expert in group]
    best = sorted(allowed, key=lambda expert: -ranks[expert])[: routing.top_k]
    weights_K = scores_E[best]
    if routing.renormalize:
        weights_K = weights_K / weights_K.sum()
    return best, weights_K * routing.scale


def _check_experts(
    ops_cls: type[Ops], sizes: ExpertSizes, dtype: str, device: torch.device
) -> None:
    """Compare `fused_experts` with loops. A token with NaN must not change other tokens."""
    import torch

    x_TD, experts_TK, weights_TK, layer = make_experts(sizes, dtype, device)
    want_TD = expert_sums(x_TD, experts_TK, weights_TK, layer)
    before = x_TD.clone()
    ops = ops_cls()
    got_TD = ops.fused_experts(x_TD, experts_TK, weights_TK, layer)
    expect(torch.equal(x_TD, before), "fused_experts must not change its input")
    expect_close(got_TD, want_TD, dtype=dtype, what=f"fused_experts {sizes}", slack=SLACK)
    if sizes.tokens > 1:
        x_TD[0] = torch.nan
        got_TD = ops.fused_experts(x_TD, experts_TK, weights_TK, layer)
        what = f"fused_experts {sizes}, another token is NaN"
        expect_close(got_TD[1:], want_TD[1:], dtype=dtype, what=what, slack=SLACK)


def make_experts(
    sizes: ExpertSizes, dtype: str, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, ExpertWeights]:
    """Return tokens, their experts and weights, and the experts' weights.

    The first expert gets most of the tokens, and the last expert gets none.
    """
    import torch

    num_experts, inner, hidden = sizes.experts, sizes.inner, sizes.hidden

    def values(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
        return random_tensor(shape, dtype=dtype, device=device, seed=seed, scale=scale)

    has_bias = bool(sizes.limit)
    layer = ExpertWeights(
        gate_up_EGD=values(num_experts, 2 * inner, hidden, seed=1, scale=hidden**-0.5),
        down_EDI=values(num_experts, hidden, inner, seed=2, scale=inner**-0.5),
        gate_up_bias_EG=values(num_experts, 2 * inner, seed=3) if has_bias else None,
        down_bias_ED=values(num_experts, hidden, seed=4) if has_bias else None,
        limit=sizes.limit,
    )
    generator = torch.Generator().manual_seed(sizes.tokens)
    share_E = torch.tensor([0.5 ** (e + 1) for e in range(num_experts - 1)] + [0.0])
    experts_TK = share_E.expand(sizes.tokens, -1).multinomial(sizes.top_k, generator=generator)
    weights_TK = torch.rand(experts_TK.shape, generator=generator)
    return values(sizes.tokens, hidden, seed=5), experts_TK.to(device), weights_TK.to(device), layer


def expert_sums(
    x_TD: torch.Tensor, experts_TK: torch.Tensor, weights_TK: torch.Tensor, layer: ExpertWeights
) -> torch.Tensor:
    """Return the weighted sum of the outputs of each token's experts, float64 [T, D]."""
    import torch

    x, sums = exact(x_TD), torch.zeros(x_TD.shape, dtype=torch.float64)
    for token, (experts, weights) in enumerate(
        zip(experts_TK.tolist(), weights_TK.tolist(), strict=True)
    ):
        for expert, weight in zip(experts, weights, strict=True):
            gate_up_G = exact(layer.gate_up_EGD[expert]) @ x[token]
            if layer.gate_up_bias_EG is not None:
                gate_up_G += exact(layer.gate_up_bias_EG[expert])
            gate_I, up_I = gate_up_G.chunk(2)
            if layer.limit:
                gate_I, up_I = gate_I.clamp(max=layer.limit), up_I.clamp(-layer.limit, layer.limit)
                inner_I = gate_I * (gate_I * layer.alpha).sigmoid() * (up_I + 1)
            else:
                inner_I = gate_I * gate_I.sigmoid() * up_I
            output_D = exact(layer.down_EDI[expert]) @ inner_I
            if layer.down_bias_ED is not None:
                output_D += exact(layer.down_bias_ED[expert])
            sums[token] += weight * output_D
    return sums
