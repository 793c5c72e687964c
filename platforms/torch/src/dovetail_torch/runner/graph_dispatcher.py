"""The dispatcher of graphs: each step is replayed if its shape has been captured, else run eagerly.

A shape is captured when it comes for the second time. The first replay with the head and the first
without it are held against an eager run, bit by bit. A model that cannot be replayed is run
eagerly, which is announced once. Knows no device and not what a graph is.
Legend: T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import dataclass

import torch

from dovetail.interfaces import Model
from dovetail.interfaces.model import AttentionContext
from dovetail_torch.graph_provider import BatchDescriptor, Forward, Graph, GraphProvider

logger = logging.getLogger(__name__)

Outputs = tuple[torch.Tensor, ...]
"""The hidden states [T, D]; then, where every token samples, the logits [T, V]."""


@dataclass(slots=True)
class GraphCounts:
    """Steps by how they were run. captured: eagerly, too, and taken down meanwhile."""

    eager: int = 0
    captured: int = 0
    replayed: int = 0


class GraphDispatcher:
    """Runs one model's steps. counts: how, so far; read by whoever wants to know."""

    def __init__(self, model: Model, provider: GraphProvider | None) -> None:
        """provider: None to run everything eagerly."""
        self._model = model
        self._provider = provider
        self._entries: dict[Hashable, tuple[Graph, Outputs]] = {}
        self._seen: set[Hashable] = set()
        self._refused: set[Hashable] = set()
        self._proven: set[bool] = set()
        self.counts = GraphCounts()

    def run(
        self,
        input_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        attention: AttentionContext,
        descriptor: BatchDescriptor,
    ) -> Outputs:
        """Return the step's hidden states, and logits if the batch is uniform.

        input_ids_T, positions_T: at every step in the same memory, as what `attention` reads. The
        outputs hold until the next step.
        """

        def forward() -> Outputs:
            hidden_TD = self._model.forward(input_ids_T, positions_T, attention)
            if not descriptor.uniform:
                return (hidden_TD,)
            return hidden_TD, self._model.compute_logits(hidden_TD)

        key = None if self._provider is None else self._provider.key(descriptor)
        if key is None:
            self.counts.eager += 1
            return forward()
        entry = self._entries.get(key)
        if entry is None:
            return self._first_times(key, forward)
        graph, outputs = entry
        graph.replay()
        if descriptor.uniform not in self._proven:
            return self._prove(outputs, forward, descriptor)
        self.counts.replayed += 1
        return outputs

    def _first_times(self, key: Hashable, forward: Forward) -> Outputs:
        """Run eagerly, and capture if the shape has been seen before."""
        if key in self._refused or key not in self._seen:
            self._seen.add(key)
            self.counts.eager += 1
            return forward()
        assert self._provider is not None, "who has no provider has no keys"
        capture = self._provider.capture(forward)
        self.counts.captured += 1
        if capture.graph is not None:
            self._entries[key] = capture.graph, capture.outputs
        elif capture.lasting:
            self._give_up(f"{capture.obstacle} cannot be replayed")
        else:
            self._refused.add(key)
            logger.info("A batch is not replayed: %s.", capture.obstacle)
        return capture.outputs

    def _prove(self, outputs: Outputs, forward: Forward, descriptor: BatchDescriptor) -> Outputs:
        """Run eagerly, too, and hold what was replayed against that."""
        replayed = [output.clone() for output in outputs]
        outputs = forward()
        self.counts.eager += 1
        if all(map(_same_bits, replayed, outputs)):
            self._proven.add(descriptor.uniform)
        else:
            self._give_up("a replay gave other results than the model itself")
        return outputs

    def _give_up(self, reason: str) -> None:
        """Run everything eagerly from now on, and say why."""
        self._provider = None
        self._entries.clear()
        name = type(self._model).__name__
        logger.warning("%s runs operation by operation, not from recordings: %s.", name, reason)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    same_sort = one.shape == other.shape and one.dtype == other.dtype
    bits = (tensor.contiguous().view(torch.uint8) for tensor in (one, other))
    return same_sort and torch.equal(*bits)
