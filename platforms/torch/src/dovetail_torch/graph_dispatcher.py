"""The graph dispatcher: replays a step if its shape was captured, and otherwise runs it eagerly.

A shape is captured when it occurs for the second time. For each kind of step (without the LM head,
with the LM head, with sampling), the first replay must be bitwise equal to an eager run. A
model that cannot be replayed is run eagerly, which is logged once. This module does not depend on
the device or on what a graph is. Dimensions: T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

from dovetail.interfaces import Model
from dovetail.interfaces.model import AttentionContext
from dovetail_torch.graph_provider import BatchDescriptor, Forward, Graph, GraphProvider
from dovetail_torch.sampling.blocks import best_tokens
from dovetail_torch.sampling.sampler import BestTokens

logger = logging.getLogger(__name__)

MAX_SAVED_BYTES = 512 << 20
"""A replay is compared with an eager run only if the states of a step have at most this size."""
SaveStates = Callable[[int], Callable[[], None] | None]
"""Copies the states that the step changes, if they have at most this many bytes, and returns a
function that restores them. Returns None if they have more."""


def _no_states(max_bytes: int) -> Callable[[], None]:
    return lambda: None


Outputs = tuple[torch.Tensor, ...]
"""The outputs of a step: hidden states [T, D], logits [T, V] if every token samples, and tokens [T]
if each request also takes its most likely token."""


@dataclass(slots=True)
class GraphCounts:
    """Counts of eager, captured and replayed steps. A captured step also runs eagerly."""

    eager: int = 0
    captured: int = 0
    replayed: int = 0


class GraphDispatcher:
    """Runs the steps of one model. counts: numbers of eager, captured and replayed steps."""

    def __init__(
        self,
        model: Model,
        provider: GraphProvider | None,
        best_tokens: BestTokens = best_tokens,
        save_states: SaveStates = _no_states,
    ) -> None:
        """provider: None to run every step eagerly. best_tokens: the op provider's argmax."""
        self._model = model
        self._save_states = save_states
        self._best_tokens = best_tokens
        self._provider = provider
        self._entries: dict[Hashable, tuple[Graph, Outputs]] = {}
        self._seen: set[Hashable] = set()
        self._rejected: set[Hashable] = set()
        self._proven: set[int] = set()
        self.counts = GraphCounts()

    def keeps(self, descriptor: BatchDescriptor) -> bool:
        """Return whether steps of this shape are replayed, now or later."""
        return self._provider is not None and self._provider.key(descriptor) is not None

    def run(
        self,
        input_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        attention: AttentionContext,
        descriptor: BatchDescriptor,
    ) -> Outputs:
        """Return hidden states. For uniform batches also logits, for greedy batches also tokens.

        input_ids_T, positions_T: in the same memory in every step, like the inputs of `attention`.
        The outputs are valid until the next step.
        """

        def forward() -> Outputs:
            hidden_TD = self._model.forward(input_ids_T, positions_T, attention)
            if not descriptor.uniform:
                return (hidden_TD,)
            logits_TV = self._model.compute_logits(hidden_TD)
            if not descriptor.greedy:
                return hidden_TD, logits_TV
            return hidden_TD, logits_TV, self._best_tokens(logits_TV)

        if self._provider is None:
            self.counts.eager += 1
            return forward()
        key = self._provider.key(descriptor)
        if key is None:
            self.counts.eager += 1
            return self._provider.run(forward)
        entry = self._entries.get(key)
        if entry is None:
            return self._first_times(key, forward)
        graph, outputs = entry
        if len(outputs) not in self._proven:
            return self._prove(graph, outputs, forward)
        graph.replay()
        self.counts.replayed += 1
        return outputs

    def replay(self, descriptor: BatchDescriptor) -> Outputs | None:
        """Replay the last step's shape with the current contents of the same inputs.

        Does nothing and returns None if the shape is not captured.
        """
        entry = None
        if self._provider is not None:
            entry = self._entries.get(self._provider.key(descriptor))
        if entry is None or len(entry[1]) not in self._proven:
            return None
        entry[0].replay()
        self.counts.replayed += 1
        return entry[1]

    def _first_times(self, key: Hashable, forward: Forward) -> Outputs:
        """Run eagerly. If the shape has occurred before, capture the computation."""
        if key in self._rejected or key not in self._seen:
            self._seen.add(key)
            self.counts.eager += 1
            return forward()
        assert self._provider is not None, "only a graph provider gives a batch a key"
        capture = self._provider.capture(forward)
        self.counts.captured += 1
        if capture.graph is not None:
            self._entries[key] = capture.graph, capture.outputs
        elif capture.permanent:
            self._give_up(f"{capture.failure_reason} cannot be replayed")
        else:
            self._rejected.add(key)
            logger.info(
                "Batches of this shape run eagerly, because they cannot be replayed: %s.",
                capture.failure_reason,
            )
        return capture.outputs

    def _prove(self, graph: Graph, outputs: Outputs, forward: Forward) -> Outputs:
        """Replay a step and run it eagerly as well, from the same states. Compare the results.

        If the states are too large to be copied, only run the step eagerly.
        """
        self.counts.eager += 1
        restore = self._save_states(MAX_SAVED_BYTES)
        if restore is None:
            return forward()
        graph.replay()
        replayed = [output.clone() for output in outputs]
        restore()
        outputs = forward()
        if all(map(_same_bits, replayed, outputs)):
            self._proven.add(len(outputs))
        else:
            self._give_up("a replay and an eager run had different results")
        return outputs

    def _give_up(self, reason: str) -> None:
        """Run every step eagerly from now on, and log the reason."""
        self._provider = None
        self._entries.clear()
        name = type(self._model).__name__
        logger.warning("The model %s runs all steps eagerly: %s.", name, reason)


def _same_bits(first: torch.Tensor, other: torch.Tensor) -> bool:
    same_sort = first.shape == other.shape and first.dtype == other.dtype
    bits = (tensor.contiguous().view(torch.uint8) for tensor in (first, other))
    return same_sort and torch.equal(*bits)
