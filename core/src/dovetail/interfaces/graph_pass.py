"""The contract of a graph pass: it changes the graph of a model before a backend compiles it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class GraphPassContext:
    """Constructor arguments of a graph pass. options: validated options of the plugin."""

    device: torch.device
    dtype: torch.dtype
    options: Mapping[str, object] = field(default_factory=dict)


class GraphPass(ABC):
    """Changes graphs of tensor operations, for example to fuse operations.

    Contract: A pass keeps the placeholders and the number of outputs of the graph. It keeps all
    calls of the operator `torch.ops.dovetail.attend` and their order, because these calls write to
    the KV cache. The outputs stay equal within the tolerance of the dtype.
    """

    CONTRACT: ClassVar[str] = "graph_pass"
    CONTRACT_VERSION: ClassVar[str] = "0.1"

    @abstractmethod
    def __init__(self, context: GraphPassContext) -> None:
        """Store `context`."""

    @abstractmethod
    def apply(self, graph: torch.fx.GraphModule) -> None:
        """Change the graph in place. The engine recompiles its code and checks it.

        Nodes have torch functions, methods and operators as targets. `node.meta["example_value"]`
        is a fake tensor with the shape and dtype of a node's result; new nodes need none.
        """

    @abstractmethod
    def cache_key(self) -> str:
        """Return a cache key for what the pass does, such as its version and options."""
