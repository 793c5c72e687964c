"""A draft contract of a compile backend: it compiles a graph of tensor operations.

There is no implementation yet, and the first one may still change the contract. A backend gets the
graph that `torch.compile` passes to its backends, and the batch sizes of the engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class CompileContext:
    """Constructor arguments of a compile backend.

    batch_sizes: numbers of tokens per step to compile for; empty for any number. cache_dir:
    directory for compiled code; None to store no code.
    """

    device: torch.device
    dtype: torch.dtype
    batch_sizes: Sequence[int] = ()
    cache_dir: Path | None = None
    options: Mapping[str, object] = field(default_factory=dict)


class CompileBackend(ABC):
    """Compiles graphs. device_types: supported device types. Empty for any."""

    CONTRACT: ClassVar[str] = "compile_backend"
    CONTRACT_VERSION: ClassVar[str] = "0.1"
    device_types: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def __init__(self, context: CompileContext) -> None:
        """Store `context`. Do not compile yet."""

    @abstractmethod
    def compile(
        self, graph: torch.fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        """Return a callable with the inputs and outputs of `graph`. Raise PluginError on failure.

        Results equal those of the graph within the tolerance of its dtype. The backend may keep a
        reference to `graph`.
        """

    @abstractmethod
    def cache_key(self) -> str:
        """Return a cache key for all inputs except the graph, such as versions and options."""
