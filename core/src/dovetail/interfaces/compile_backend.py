"""The contract of a compile backend: it compiles a graph of tensor operations into a callable.

A backend gets the graphs that `torch.compile` passes to its backends: the whole forward pass of a
model, or its pieces between attention layers.
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

    cache_dir: directory for files that make a later compilation of the same graphs faster, or None
    to keep no files. The directory exists during calls of `compile`. Before the first call the
    engine restores the files of an earlier start with the same first graph, options, versions and
    `cache_key`. The directory is deleted when the engine has started. options: validated options of
    the backend plugin.
    """

    device: torch.device
    dtype: torch.dtype
    cache_dir: Path | None = None
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CompileRequest:
    """One graph to compile.

    example_inputs: one per placeholder, in order: fake tensors, whose sizes may be symbolic, and
    integers, which may be symbolic. num_tokens: the number of tokens in every call, or None if
    calls may have any number from 1.
    """

    graph: torch.fx.GraphModule
    example_inputs: Sequence[Any]
    num_tokens: int | None = None


class CompileBackend(ABC):
    """Compiles graphs. device_types: supported device types, torch's names. Empty for any."""

    CONTRACT: ClassVar[str] = "compile_backend"
    CONTRACT_VERSION: ClassVar[str] = "0.2"
    device_types: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def __init__(self, context: CompileContext) -> None:
        """Store `context`. Do not compile yet."""

    @abstractmethod
    def compile(self, request: CompileRequest) -> Callable[..., Any]:
        """Return a callable that takes the graph's inputs and returns a list or tuple of outputs.

        Raise an exception on failure. The engine reports it with the name of the backend.

        Outputs equal those of the graph within the tolerance of the dtype. The callable reads its
        inputs in each call, keeps no reference to them, and does not compile again. It is called
        in torch's inference mode, from one thread. The backend may keep or change the graph.
        """

    @abstractmethod
    def cache_key(self) -> str:
        """Return a cache key for everything that compiled code depends on, except the graph.

        For example versions, options, and the instruction set of the processor.
        """
