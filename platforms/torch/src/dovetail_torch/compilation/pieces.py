"""Splits a graph at its attention calls, and compiles the pieces between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule, Interpreter
from torch.fx.passes.split_module import split_module

from dovetail_torch.attention_table import AttentionTable
from dovetail_torch.compilation.graphs import attention_indices, is_attention

CompilePiece = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]
"""Compiles a graph for inputs with the properties of these example inputs."""


def compile_pieces(
    graph: GraphModule,
    example_inputs: Sequence[Any],
    table: AttentionTable,
    compile_piece: CompilePiece,
) -> Callable[..., Any]:
    """Return a callable like `graph` that runs compiled pieces, and attention between them.

    Attention between the pieces is a direct call of `table.run`, without a torch operator.
    """
    numbers, number = {}, 0
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        number += is_attention(node)
        numbers[node] = number
        number += is_attention(node)
    split = split_module(graph, None, lambda node: numbers[node], keep_original_order=True)
    # The example inputs of a piece are the outputs of earlier ones: run all with fake tensors.
    pieces = _PieceInputs(split)
    pieces.run(*example_inputs)
    for name, inputs in pieces.inputs.items():
        piece = getattr(split, name)
        indices = attention_indices(piece)
        call = _attention_call(piece, table) if indices else compile_piece(piece, inputs)
        # The code of the split graph reads these attributes; modules would add a call.
        delattr(split, name)
        split.__dict__[name] = call
    forward: Callable[..., Any] = split.forward
    return forward


class _PieceInputs(Interpreter):
    """Runs a split graph and keeps the inputs of each piece."""

    def __init__(self, split: GraphModule) -> None:
        super().__init__(split)
        self.inputs: dict[str, Sequence[Any]] = {}

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Keep the inputs, and return the outputs."""
        self.inputs[str(target)] = args
        return super().call_module(target, args, kwargs)


def _attention_call(piece: GraphModule, table: AttentionTable) -> Callable[..., Any]:
    """Return a callable with the inputs of a piece that only calls attention."""
    names = [node for node in piece.graph.nodes if node.op == "placeholder"]
    (call,) = (node for node in piece.graph.nodes if is_attention(node))
    places = [names.index(argument) for argument in call.args[:3]]
    index = attention_indices(piece)[0]

    def attend(*inputs: Any) -> Any:
        q_THD, k_TKD, v_TKD = (inputs[place] for place in places)
        return table.run(index, q_THD, k_TKD, v_TKD)

    return attend
