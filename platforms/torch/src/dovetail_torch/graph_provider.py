"""The interface of graphs: a device captures the computation of a batch shape, and replays it.

A platform's worker returns a provider or None; the runner's dispatcher calls it. Only the provider
knows what a graph is (recorded native calls, or a device graph). This module does not depend on
models, plans or requests.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol

import torch

Forward = Callable[[], tuple[torch.Tensor, ...]]
"""A computation with inputs at fixed addresses, whose outputs depend only on them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDescriptor:
    """The shape of a step.

    uniform: each request has one token and samples.
    greedy: each request also takes the most likely token of its unchanged logits.
    """

    num_tokens: int
    num_requests: int
    uniform: bool
    greedy: bool = False


class Graph(Protocol):
    """One captured computation."""

    def replay(self) -> None:
        """Repeat the computation with the current inputs, and overwrite the outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """The result of a capture.

    outputs: the outputs of the run. With a graph, each replay overwrites them, and other graphs of
    the same provider may reuse their memory. graph: None if the capture failed. failure_reason:
    what prevented the capture, such as the name of an operation. permanent: whether captures of
    every batch size would fail for this reason.
    """

    outputs: tuple[torch.Tensor, ...]
    graph: Graph | None = None
    failure_reason: str = ""
    permanent: bool = True


class GraphProvider(Protocol):
    """Captures, replays and runs computations on one device, from one thread."""

    def key(self, descriptor: BatchDescriptor) -> Hashable | None:
        """Return the key of the graph for this batch shape, or None if it is never captured."""

    def capture(self, forward: Forward) -> Capture:
        """Run `forward` once and capture it.

        For a model without recurrent layers, an implementation may run it twice, because the second
        run writes the same slots.
        """

    def run(self, forward: Forward) -> tuple[torch.Tensor, ...]:
        """Run `forward` once, for a batch without a key.

        The outputs are valid until the provider's next call, which may reuse their memory.
        """
