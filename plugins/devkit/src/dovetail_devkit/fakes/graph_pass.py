"""A fake graph pass that changes a graph but not its results."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from dovetail.interfaces.graph_pass import GraphPass, GraphPassContext

if TYPE_CHECKING:
    import torch


class FakeGraphPass(GraphPass):
    """Adds an unused operation and removes it. num_applied: changed graphs, over all engines."""

    num_applied: ClassVar[int] = 0

    def __init__(self, context: GraphPassContext) -> None:
        pass

    def apply(self, graph: torch.fx.GraphModule) -> None:
        """Add an operation before the output, and remove all unused operations."""
        type(self).num_applied += 1
        output = next(node for node in graph.graph.nodes if node.op == "output")
        with graph.graph.inserting_before(output):
            graph.graph.call_function(len, (output.args[0],))
        unused = [node for node in graph.graph.nodes if node.target is len and not node.users]
        for node in unused:
            graph.graph.erase_node(node)

    def cache_key(self) -> str:
        """Return the version of the fake."""
        return "fake 1"
