"""The conformance suite of the compile backend contract, for any backend on any device.

Compiles a small network, traced by torch, and compares the results with the network. Imports
torch, so import this module only to test backends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from dovetail.interfaces.compile_backend import CompileBackend, CompileContext, CompileRequest
from dovetail_devkit.case import Case, run_all
from dovetail_devkit.expectation import checking, expect
from dovetail_devkit.harnesses.traced_graph import (
    NUM_FEATURES,
    TRACED_TOKENS,
    SmallNetwork,
    TracedFunction,
    with_num_tokens,
)

_NUM_TOKENS = (1, 2, TRACED_TOKENS, 40)
_FIXED_TOKENS = 5
_TOLERANCE = 1e-4
Options = Mapping[str, object]


@checking("compile_backend")
def check_compile_backend(
    backend_cls: type[CompileBackend], device: torch.device, *, options: Options | None = None
) -> None:
    """Check a backend on `device`. Raise AssertionError with the violated rule."""
    run_all(compile_backend_cases(backend_cls, device, options=options))


def compile_backend_cases(
    backend_cls: type[CompileBackend], device: torch.device, *, options: Options | None = None
) -> Iterator[Case]:
    """Yield the suite's cases. The arguments are the same as for `check_compile_backend`."""
    suite = _Suite(backend_cls, device, options or {})
    yield Case(name="any number of tokens", run=suite.check_any_number)
    yield Case(name="a fixed number of tokens", run=suite.check_fixed_number)
    yield Case(name="cached files of an earlier start are reused", run=suite.check_folder)
    yield Case(name="the cache key is constant", run=suite.check_key)


class _Suite:
    def __init__(
        self, backend_cls: type[CompileBackend], device: torch.device, options: Options
    ) -> None:
        self._cls, self._device, self._options = backend_cls, device, options

    def check_any_number(self) -> None:
        """Check code for any number of tokens, without a cache directory."""
        network = SmallNetwork(self._device, torch.float32)
        compiled = self._compile(network, self._make(None), None)
        for num_tokens in _NUM_TOKENS:
            self._compare(network, compiled, num_tokens)
        first_TD = self._input(TRACED_TOKENS)
        earlier = [output.clone() for output in compiled(first_TD)]
        with torch.no_grad():
            network.scale_E.mul_(2.0)
        later = compiled(first_TD)
        expect(
            not torch.equal(earlier[0], later[0]),
            "the callable must read its inputs in each call; a changed weight has no effect",
        )
        self._compare(network, compiled, 3)

    def check_fixed_number(self) -> None:
        """Check code for one number of tokens."""
        network = SmallNetwork(self._device, torch.float32)
        compiled = self._compile(network, self._make(None), _FIXED_TOKENS)
        self._compare(network, compiled, _FIXED_TOKENS)

    def check_folder(self) -> None:
        """Check that a second backend works with the files of the first one, and without files."""
        network = SmallNetwork(self._device, torch.float32)
        with TemporaryDirectory() as folder:
            for _ in range(2):
                compiled = self._compile(network, self._make(Path(folder)), None)
                self._compare(network, compiled, TRACED_TOKENS)

    def check_key(self) -> None:
        """Check the type of the key, and that it does not depend on the directory."""
        with TemporaryDirectory() as folder:
            keys = [self._make(path).cache_key() for path in (None, Path(folder))]
        expect(
            all(isinstance(key, str) and key for key in keys) and keys[0] == keys[1],
            f"cache_key must return the same string for the same options; it returned {keys}",
        )

    def _make(self, folder: Path | None) -> CompileBackend:
        return self._cls(
            CompileContext(
                device=self._device, dtype=torch.float32, cache_dir=folder, options=self._options
            )
        )

    def _input(self, num_tokens: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(num_tokens)
        return torch.randn(num_tokens, NUM_FEATURES, generator=generator).to(self._device)

    def _compile(
        self, network: SmallNetwork, backend: CompileBackend, num_tokens: int | None
    ) -> Callable[[torch.Tensor], Sequence[torch.Tensor]]:
        compile_graph = partial(_compile_graph, backend, num_tokens)
        x_TD = self._input(num_tokens or TRACED_TOKENS)
        return TracedFunction(network.forward, x_TD, compile_graph)

    def _compare(
        self,
        network: SmallNetwork,
        compiled: Callable[[torch.Tensor], Sequence[torch.Tensor]],
        num_tokens: int,
    ) -> None:
        x_TD = self._input(num_tokens)
        before_TD = x_TD.clone()
        outputs, expected = compiled(x_TD), network(x_TD)
        expect(torch.equal(x_TD, before_TD), "the callable must not change its inputs")
        for output, exact in zip(outputs, expected, strict=True):
            close = output.shape == exact.shape and torch.allclose(
                output, exact, rtol=_TOLERANCE, atol=_TOLERANCE
            )
            expect(close, f"{num_tokens} tokens: the outputs must equal those of the graph")


def _compile_graph(
    backend: CompileBackend,
    num_tokens: int | None,
    graph: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
) -> Callable[..., Any]:
    if num_tokens is not None:
        example_inputs = with_num_tokens(example_inputs, num_tokens)
    num_outputs = sum(len(node.args[0]) for node in graph.graph.nodes if node.op == "output")
    request = CompileRequest(graph=graph, example_inputs=example_inputs, num_tokens=num_tokens)
    code = backend.compile(request)
    expect(callable(code), f"compile must return a callable; it returned {code!r:.80}")

    def call(*inputs: Any) -> Any:
        outputs = code(*inputs)
        expect(
            isinstance(outputs, (tuple, list)) and len(outputs) == num_outputs,
            f"the callable must return a list or tuple of {num_outputs} outputs; it returned "
            f"{type(outputs).__name__}",
        )
        return outputs

    return call
