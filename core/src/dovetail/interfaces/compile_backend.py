"""A sketch of the contract of a compile backend: a graph of tensor operations to a callable.

Version 0.x without an implementation: whoever writes the first one may still change it. The idea:
what `torch.compile` hands to a backend, with the engine's own knowledge of shapes beside it.
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
    """All that a backend is made from.

    batch_sizes: tokens of a step to compile for; empty for any number.
    cache_dir: where compiled code may be kept; None forbids it.
    """

    device: torch.device
    dtype: torch.dtype
    batch_sizes: Sequence[int] = ()
    cache_dir: Path | None = None
    options: Mapping[str, object] = field(default_factory=dict)


class CompileBackend(ABC):
    """Compiles graphs. device_types: those it is made for; empty for any."""

    CONTRACT: ClassVar[str] = "compile_backend"
    CONTRACT_VERSION: ClassVar[str] = "0.1"
    device_types: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def __init__(self, context: CompileContext) -> None:
        """Keep `context`; compile nothing yet."""

    @abstractmethod
    def compile(
        self, graph: torch.fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        """Return a callable with the inputs and outputs of `graph`; raise PluginError if it cannot.

        Results agree with the graph's within the tolerance of its dtype. `graph` may be kept.
        """

    @abstractmethod
    def cache_key(self) -> str:
        """Return what, beside graph and inputs, the compiled code depends on: versions, options."""
