"""The seam of graphs: a device keeps how a batch of some shape is computed, and does it again.

A platform's worker gives a provider or none; the runner's dispatcher asks it. What a graph is (a
recording of native calls, a device's own graph) only the provider knows. It refuses to know models,
plans and requests.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol

import torch

Forward = Callable[[], tuple[torch.Tensor, ...]]
"""A computation whose inputs stay where they are and whose outputs depend on them alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDescriptor:
    """The shape of a step.

    uniform: each request has one token, after which it samples. greedy: and takes its best token,
    of the logits as they are.
    """

    num_tokens: int
    num_requests: int
    uniform: bool
    greedy: bool = False


class Graph(Protocol):
    """One computation that was captured."""

    def replay(self) -> None:
        """Compute again from what the inputs' memory holds now, into the outputs' memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """What came of a capture.

    outputs: of the run; where there is a graph, each replay writes to them again, and what another
    graph of the same provider computes may take their memory. graph: None where there is none.
    obstacle: then the operation, or whatever else, that cannot be replayed. lasting: whether it
    stands in the way at every size of batch.
    """

    outputs: tuple[torch.Tensor, ...]
    graph: Graph | None = None
    obstacle: str = ""
    lasting: bool = True


class GraphProvider(Protocol):
    """Captures and replays on one device, and runs what it does not capture; from one thread."""

    def key(self, descriptor: BatchDescriptor) -> Hashable | None:
        """Return what batches that one graph serves have in common; None: never captured."""

    def capture(self, forward: Forward) -> Capture:
        """Run `forward` once, for real, and keep how it is done again.

        What it does may be done twice to the same end: keys and values go where they were.
        """

    def run(self, forward: Forward) -> tuple[torch.Tensor, ...]:
        """Run `forward` once, for a batch without a key.

        The outputs hold until the provider's next call: they may lie in memory that is used again.
        """
