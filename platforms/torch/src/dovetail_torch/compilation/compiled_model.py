"""A model whose forward pass runs compiled code. The LM head is not compiled.

Level "as_is" leaves everything to `torch.compile`: it selects shapes, checks guards in each call,
and compiles again for a call that does not meet them. The levels "once" and "piecewise" trace the
forward pass once, for any number of tokens, and then call the compiled code directly, so that no
guard is evaluated and nothing is recompiled.
Dimensions: T tokens, D hidden size, S sampled tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, cast

import torch

from dovetail.errors import ConfigError, DovetailError, PluginError
from dovetail.interfaces import Model
from dovetail.interfaces.model import AttentionContext
from dovetail.plugins.containment import describe_failure
from dovetail_torch.attention_table import AttentionTable, CurrentAttention, current_table
from dovetail_torch.compilation.compiler import Compiled, GraphCompiler

Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_TOLERANCES = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Maximum error of compiled hidden states relative to eager ones, in the Euclidean norm."""
_MAX_CAUSE_CHARS = 300


class CompiledModel:
    """Implements `Model` for one attention table. Other attention contexts run eagerly.

    is_checking: whether each forward pass is compared with an eager one, as during the warm-up.
    """

    def __init__(self, model: Model, table: AttentionTable, compiler: GraphCompiler) -> None:
        self.is_checking = False
        self._model, self._table, self._compiler = model, table, compiler
        context = CurrentAttention()
        run = _own_code(lambda ids_T, positions_T: model.forward(ids_T, positions_T, context))
        as_is = compiler.report.level == "as_is"
        self._run: Forward = _AsIs(run, compiler) if as_is else _OnceTraced(run, compiler)

    def forward(
        self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, attention: AttentionContext
    ) -> torch.Tensor:
        """Return the hidden states of all tokens, [T, D]."""
        if attention is not self._table:
            return self._model.forward(input_ids_T, positions_T, attention)
        if self.is_checking:
            return self._check(input_ids_T, positions_T)
        with current_table(self._table):
            return self._run(input_ids_T, positions_T)

    def compute_logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return self._model.compute_logits(hidden_SD)

    def _check(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """Compile if necessary, and compare the result with an eager run.

        Raises ConfigError if torch cannot trace the model, PluginError for a failure of the backend
        or a wrong result.
        """
        try:
            with current_table(self._table):
                hidden_TD = self._run(input_ids_T, positions_T)
        except (DovetailError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise self._explain(error) from error
        needed_S, self._table.needed_S = self._table.needed_S, None
        expected_TD = self._model.forward(input_ids_T, positions_T, self._table)
        self._table.needed_S = needed_S
        problem = _difference(hidden_TD, expected_TD)
        if problem:
            raise PluginError(
                f"{self._owner()} computes wrong results for {len(input_ids_T)} tokens: {problem}. "
                "Choose another compile_backend, omit compile_passes, or omit compile_level."
            )
        return hidden_TD

    def _owner(self) -> str:
        report = self._compiler.report
        return f"compile_level={report.level!r} with compile_backend={report.backend!r}"

    def _explain(self, error: Exception) -> DovetailError:
        """Return the error that the user sees."""
        if self._compiler.error is not None:
            return self._compiler.error
        report, name = self._compiler.report, type(self._model).__name__
        if report.num_compiled:
            return PluginError(
                f"{self._owner()}: the compiled code failed: {describe_failure(error)}. Choose "
                "another compile_backend, or omit compile_level."
            )
        cause = " ".join(str(error).split())[:_MAX_CAUSE_CHARS]
        return ConfigError(
            f"compile_level={report.level!r}: torch.compile cannot trace the model {name}: "
            f"{type(error).__name__}: {cause}. Omit compile_level, or choose plugins that "
            "torch can trace, such as linear_method='torch' and ops='torch'."
        )


class _AsIs:
    """A forward function that `torch.compile` compiles with its own choice of shapes and guards."""

    def __init__(self, run: Forward, compiler: GraphCompiler) -> None:
        self._source, self._compiler = run, compiler
        self._run: Forward | None = None

    def __call__(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """Return the hidden states [T, D]."""
        if self._run is None:  # not earlier, because it imports the compiler
            self._run = torch.compile(self._source, fullgraph=True, backend=self._compiler)
        return self._run(input_ids_T, positions_T)


class _OnceTraced:
    """A forward function that is traced in its first call.

    The compiled code has the weights and other constants among its inputs. They are found by
    recording the call that torch makes.
    """

    def __init__(self, run: Forward, compiler: GraphCompiler) -> None:
        self._run, self._compiler = run, compiler
        self._code: Compiled | None = None
        self._inputs: list[Any] = []
        self._ids: list[int] = []
        self._positions: list[int] = []
        self._counts: list[int] = []
        self._output = 0

    def __call__(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """Return the hidden states [T, D]."""
        if self._code is None:
            return self._trace(input_ids_T, positions_T)
        inputs = self._inputs.copy()
        for place in self._ids:
            inputs[place] = input_ids_T
        for place in self._positions:
            inputs[place] = positions_T
        for place in self._counts:
            inputs[place] = len(input_ids_T)
        hidden_TD: torch.Tensor = self._code(*inputs)[self._output]
        return hidden_TD

    def _trace(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        calls: list[tuple[Compiled, tuple[Any, ...], Any]] = []

        def backend(graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Compiled:
            code = self._compiler(graph, example_inputs)

            def call(*inputs: Any) -> Any:
                outputs = code(*inputs)
                calls.append((code, inputs, outputs))
                return outputs

            return call

        # Views are marked, because `mark_dynamic` changes its argument permanently.
        ids_T, own_positions_T = input_ids_T.view(-1), positions_T.view(-1)
        if len(ids_T) > 1:
            torch._dynamo.mark_dynamic(ids_T, 0)
            torch._dynamo.mark_dynamic(own_positions_T, 0)
        traced = torch.compile(self._run, fullgraph=True, backend=backend)
        # Numbers in a model are constants, even if an earlier engine in this process had others.
        with torch._dynamo.config.patch(specialize_int=True, automatic_dynamic_shapes=False):
            hidden_TD: torch.Tensor = traced(ids_T, own_positions_T)
        self._bind(calls, ids_T, own_positions_T, hidden_TD)
        return hidden_TD

    def _bind(
        self,
        calls: list[tuple[Compiled, tuple[Any, ...], Any]],
        ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        hidden_TD: torch.Tensor,
    ) -> None:
        """Find the inputs and the output of the compiled code."""
        places = [
            place
            for _, _, outputs in calls[:1]
            for place, output in enumerate(outputs)
            if output is hidden_TD
        ]
        if len(calls) != 1 or not places:
            raise ConfigError(
                "the forward pass calls compiled code more than once, which only "
                "compile_level='as_is' supports"
            )
        code, inputs, _ = calls[0]
        for place, value in enumerate(inputs):
            if value is ids_T:
                self._ids.append(place)
            elif value is positions_T:
                self._positions.append(place)
            elif not isinstance(value, torch.Tensor):
                self._counts.append(place)
                if value != len(ids_T):
                    raise ConfigError(
                        f"the forward pass depends on the number {value!r:.80}, which may change; "
                        "only compile_level='as_is' supports it"
                    )
        keeps = {*self._ids, *self._positions, *self._counts}
        self._inputs = [None if place in keeps else value for place, value in enumerate(inputs)]
        self._output, self._code = places[0], code


def _own_code(function: Forward) -> Forward:
    """Return a copy of a function with a separate code object.

    torch keeps compiled code by code object, at most 8 variants: engines must not share one.
    """
    source = cast(FunctionType, function)
    copied = FunctionType(
        source.__code__.replace(), source.__globals__, "forward", None, source.__closure__
    )
    return cast(Forward, copied)


def _difference(hidden_TD: object, expected_TD: torch.Tensor) -> str:
    """Return how a result differs from the expected one, or "" within the tolerance."""
    if not isinstance(hidden_TD, torch.Tensor):
        return f"a {type(hidden_TD).__name__} instead of a tensor"
    if (hidden_TD.shape, hidden_TD.dtype) != (expected_TD.shape, expected_TD.dtype):
        return (
            f"{list(hidden_TD.shape)} of {hidden_TD.dtype} instead of {list(expected_TD.shape)} of "
            f"{expected_TD.dtype}"
        )
    expected = expected_TD.float()
    error = (hidden_TD.float() - expected).norm() / expected.norm().clamp_min(1e-30)
    maximum = _TOLERANCES.get(expected_TD.dtype, _TOLERANCES[torch.bfloat16])
    # The comparison is also false for NaN.
    if float(error) <= maximum:
        return ""
    return f"their relative error is {float(error):.2g}, and the maximum is {maximum:.2g}"
