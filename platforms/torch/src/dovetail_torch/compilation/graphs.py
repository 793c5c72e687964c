"""Graphs of a forward pass: their attention calls, and their canonical description."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, maybe_get_fake_mode
from torch.fx import GraphModule, Node

_INDEX = 4
"""Position of the layer index among the arguments of `dovetail::attend`."""
_MAX_CONSTANT_ELEMENTS = 1 << 20


def is_attention(node: Node) -> bool:
    """Return whether a node calls the attention operator."""
    packet = torch.ops.dovetail.attend
    return node.op == "call_function" and node.target in (packet, packet.default)


def attention_indices(graph: GraphModule) -> list[int]:
    """Return the layer indices of the attention calls, in order."""
    return [node.args[_INDEX] for node in graph.graph.nodes if is_attention(node)]


def example_inputs_of(graph: GraphModule) -> list[Any]:
    """Return the inputs that torch has traced a graph with: fake tensors and symbolic integers."""
    nodes = (node for node in graph.graph.nodes if node.op == "placeholder")
    return [node.meta["example_value"] for node in nodes]


def fake_mode_of(example_inputs: Sequence[Any]) -> FakeTensorMode:
    """Return the mode of the fake tensors; if there are none, the mode of torch's context."""
    modes = (maybe_get_fake_mode(item) for item in example_inputs)
    return next((mode for mode in modes if mode is not None), None) or FakeTensorMode()


def describe_graph(graph: GraphModule, example_inputs: Sequence[Any]) -> str:
    """Return a hash of the operations of a graph and the properties of its inputs.

    Names do not matter. Equal graphs compute the same function of their inputs.
    """
    numbers = {node: number for number, node in enumerate(graph.graph.nodes)}
    lines = [_describe_input(value) for value in example_inputs]
    for node in graph.graph.nodes:
        arguments = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: f"%{numbers[n]}")
        target: object = node.op if node.op in ("placeholder", "output") else _target(node)
        if node.op == "get_attr":
            target = _describe_constant(_attribute(graph, str(node.target)))
        lines.append(f"{node.op} {target} {arguments!r}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _target(node: Node) -> str:
    if isinstance(node.target, str):
        return node.target
    module = getattr(node.target, "__module__", "")
    return f"{module}.{torch.typename(node.target)}.{node.target!s}".partition(" at 0x")[0]


def _describe_input(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"{type(value).__name__} {value}"
    stride = "" if value.layout is not torch.strided else tuple(map(str, value.stride()))
    sizes = tuple(map(str, value.shape))
    return f"{sizes} {stride} {value.dtype} {value.device} {value.layout}"


def _attribute(graph: GraphModule, path: str) -> Any:
    value: Any = graph
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _describe_constant(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        if value.numel() > _MAX_CONSTANT_ELEMENTS:
            return f"tensor {id(value)}"  # never equal to another one
        return f"{value.dtype} {value.tolist()!r}"
    return repr(value)
