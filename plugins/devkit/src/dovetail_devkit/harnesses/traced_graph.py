"""Traces a small function with torch.compile, as a torch worker traces the forward pass of a model.

Dimensions: T tokens, D features, E features of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor

Compile = Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]
TRACED_TOKENS = 7
NUM_FEATURES, NUM_RESULTS = 24, 16


class SmallNetwork(torch.nn.Module):
    """A projection, a gated activation, a norm and a residual, with a second output."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)

        def random(*shape: int) -> torch.nn.Parameter:
            values = torch.randn(shape, generator=generator).to(device, dtype)
            return torch.nn.Parameter(values, requires_grad=False)

        self.weight_2ED = random(2 * NUM_RESULTS, NUM_FEATURES)
        self.scale_E = random(NUM_RESULTS)
        self.residual_ED = random(NUM_RESULTS, NUM_FEATURES)

    def forward(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return [T, E] and [T]."""
        gate_TE, up_TE = torch.nn.functional.linear(x_TD, self.weight_2ED).chunk(2, dim=-1)
        y_TE = torch.nn.functional.silu(gate_TE) * up_TE
        size_T1 = y_TE.float().square().mean(-1, keepdim=True).add(1e-6).rsqrt()
        y_TE = (y_TE.float() * size_T1).to(y_TE.dtype) * self.scale_E
        return y_TE + torch.nn.functional.linear(x_TD, self.residual_ED), up_TE.sum(-1)


class TracedFunction:
    """A function of one tensor [T, D], compiled with a dynamic number of tokens."""

    def __init__(
        self, function: Callable[[torch.Tensor], Any], x_TD: torch.Tensor, compile_graph: Compile
    ) -> None:
        """Trace `function` with `x_TD`, and call `compile_graph` with graph and example inputs."""
        self._calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []

        def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
            nodes = (node for node in graph.graph.nodes if node.op == "placeholder")
            example_inputs = [node.meta["example_value"] for node in nodes]
            modes = [item.fake_mode for item in example_inputs if isinstance(item, FakeTensor)]
            with modes[0], tracing(TracingContext(modes[0])):
                code = compile_graph(graph, example_inputs)

            def call(*inputs: Any) -> Any:
                self._calls.append((code, inputs))
                return code(*inputs)

            return call

        self._x_TD = x_TD
        torch._dynamo.reset()
        torch._dynamo.mark_dynamic(x_TD, 0)
        with torch.inference_mode():
            self.outputs = torch.compile(function, fullgraph=True, backend=backend)(x_TD)
        torch._dynamo.reset()

    def __call__(self, x_TD: torch.Tensor) -> Any:
        """Return what the compiled code returns for another number of tokens."""
        code, traced = self._calls[0]
        inputs = [
            x_TD if item is self._x_TD else item if isinstance(item, torch.Tensor) else len(x_TD)
            for item in traced
        ]
        with torch.inference_mode():
            return code(*inputs)


def with_num_tokens(example_inputs: Sequence[Any], num_tokens: int) -> list[Any]:
    """Return the example inputs for one number of tokens."""
    inputs: list[Any] = []
    for item in example_inputs:
        if isinstance(item, torch.SymInt):
            item = num_tokens
        elif any(isinstance(size, torch.SymInt) for size in item.shape):
            sizes = [num_tokens if isinstance(size, torch.SymInt) else size for size in item.shape]
            with item.fake_mode:
                item = torch.empty(sizes, dtype=item.dtype, device=item.device)
        inputs.append(item)
    return inputs
