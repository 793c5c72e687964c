"""Graph passes: they are applied in order, and each result is checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import GraphModule

from dovetail.errors import PluginError
from dovetail.interfaces import GraphPass
from dovetail.plugins.containment import describe_failure
from dovetail_torch.compilation.graphs import attention_indices


@dataclass(frozen=True, kw_only=True)
class NamedPass:
    """A graph pass and the name by which the user selected it."""

    name: str
    graph_pass: GraphPass


def apply_passes(graph: GraphModule, passes: Sequence[NamedPass]) -> None:
    """Apply `passes` to `graph` in place. Raise PluginError if one fails or breaks its contract."""
    for named in passes:
        before = _interface(graph)
        try:
            named.graph_pass.apply(graph)
            graph.graph.lint()
            graph.recompile()
        except Exception as error:
            raise PluginError(
                f"compile_passes: the graph pass {named.name} failed: {describe_failure(error)}. "
                "Omit it, or correct it."
            ) from error
        after = _interface(graph)
        for what, earlier in before.items():
            if after[what] != earlier:
                raise PluginError(
                    f"compile_passes: the graph pass {named.name} changed the {what} of the graph "
                    f"from {earlier!r:.200} to {after[what]!r:.200}, which it must keep. "
                    "Omit it, or correct it."
                )


def _interface(graph: GraphModule) -> dict[str, object]:
    """Return the parts of a graph that a pass must not change."""
    nodes = list(graph.graph.nodes)
    outputs = [node.args[0] for node in nodes if node.op == "output"]
    return {
        "placeholders": [node.name for node in nodes if node.op == "placeholder"],
        "number of outputs": [len(values) for values in outputs],
        "attention calls": attention_indices(graph),
    }
