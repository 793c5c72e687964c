"""The conformance suite of the graph pass contract, on a small graph with an attention call.

It needs dovetail-torch, which contains the attention operator, so import this module only to test
passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from dovetail.interfaces.graph_pass import GraphPass, GraphPassContext
from dovetail_devkit.case import Case, run_all
from dovetail_devkit.expectation import checking, expect
from dovetail_devkit.harnesses.traced_graph import (
    NUM_FEATURES,
    TRACED_TOKENS,
    SmallNetwork,
    TracedFunction,
)
from dovetail_torch.attention_table import AttentionTable

_NUM_TOKENS = (1, TRACED_TOKENS, 40)
_TOLERANCE = 1e-4
Options = Mapping[str, object]


@checking("graph_pass")
def check_graph_pass(
    pass_cls: type[GraphPass], device: torch.device, *, options: Options | None = None
) -> None:
    """Check a pass on `device`. Raise AssertionError with the violated rule."""
    run_all(graph_pass_cases(pass_cls, device, options=options))


def graph_pass_cases(
    pass_cls: type[GraphPass], device: torch.device, *, options: Options | None = None
) -> Iterator[Case]:
    """Yield the suite's cases. The arguments are the same as for `check_graph_pass`."""
    context = GraphPassContext(device=device, dtype=torch.float32, options=options or {})

    def check_graph() -> None:
        _check_graph(pass_cls(context), device)

    def check_key() -> None:
        keys = [pass_cls(context).cache_key() for _ in range(2)]
        expect(
            all(isinstance(key, str) and key for key in keys) and keys[0] == keys[1],
            f"cache_key must return the same string for the same options; it returned {keys}",
        )

    yield Case(name="the results of the graph do not change", run=check_graph)
    yield Case(name="the cache key is constant", run=check_key)


class _AddsKeys:
    """An attention layer whose result is the sum of query, key and value."""

    def forward(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        cache: torch.Tensor,
        metadata: object,
        out_THD: torch.Tensor,
    ) -> None:
        cache += 1
        out_THD.copy_(q_THD + k_TKD + v_TKD)


def _check_graph(graph_pass: GraphPass, device: torch.device) -> None:
    network = SmallNetwork(device, torch.float32)
    num_calls = torch.zeros(1)
    table = AttentionTable([_AddsKeys()] * 2, [num_calls] * 2, [0, 0])
    table.metadata = [None]

    def forward(x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x_T1D = x_TD[:, None]
        for index in range(2):
            x_T1D = table.attend(index, x_T1D, x_T1D, x_T1D)
        outputs: tuple[torch.Tensor, torch.Tensor] = network(x_T1D[:, 0])
        return outputs

    def compile_graph(graph: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        before = _interface(graph)
        graph_pass.apply(graph)
        graph.graph.lint()
        graph.recompile()
        after = _interface(graph)
        for what, value in before.items():
            expect(after[what] == value, f"a pass must keep the {what} of the graph")
        code: Callable[..., Any] = graph.forward
        return code

    generator = torch.Generator().manual_seed(1)
    x_TD = torch.randn(TRACED_TOKENS, NUM_FEATURES, generator=generator).to(device)
    changed = TracedFunction(forward, x_TD, compile_graph)
    for num_tokens in _NUM_TOKENS:
        x_TD = torch.randn(num_tokens, NUM_FEATURES, generator=generator).to(device)
        for output, exact in zip(changed(x_TD), forward(x_TD), strict=True):
            close = torch.allclose(output, exact, rtol=_TOLERANCE, atol=_TOLERANCE)
            expect(close, f"{num_tokens} tokens: the outputs of the changed graph must be equal")


def _interface(graph: torch.fx.GraphModule) -> dict[str, object]:
    nodes = list(graph.graph.nodes)
    attend = torch.ops.dovetail.attend
    return {
        "placeholders": [node.name for node in nodes if node.op == "placeholder"],
        "number of outputs": [len(node.args[0]) for node in nodes if node.op == "output"],
        "attention calls": [
            node.args[4] for node in nodes if node.target in (attend, attend.default)
        ],
    }
