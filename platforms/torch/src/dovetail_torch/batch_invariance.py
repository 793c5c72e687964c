"""Find out whether the selected plugins make a request's tokens independent of other requests.

A plugin may guarantee, for some dtypes, that the result of a request is bitwise equal in every
batch. If one
plugin lacks the guarantee, a seeded request may get different tokens in another batch.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable

from torch import nn

from dovetail.errors import ConfigError
from dovetail.interfaces import AttentionBackend, LinearMethod, Ops, RankGroup
from dovetail.interfaces.ops import (
    LATENT_OPERATIONS,
    MIXED_OPERATIONS,
    STATE_OPERATIONS,
    overridden_operations,
)
from dovetail.plugins.contracts.declared import promises_equal_bits
from dovetail_torch.layers.activation import GeluTanhAndMul
from dovetail_torch.layers.attention import Attention, CacheLayer
from dovetail_torch.layers.state import StateLayer

logger = logging.getLogger(__name__)


class BatchInvariance:
    """Collects the plugins without the guarantee. Rejects them if the guarantee is required."""

    def __init__(self, dtype: str, *, required: bool) -> None:
        """dtype: dtype of the model. required: the value of `EngineArgs.batch_invariant`."""
        self._dtype = dtype
        self._required = required
        self._without: list[str] = []

    def add(self, kind: str, cls: type[LinearMethod] | type[Ops]) -> None:
        """Add a linear method or an op provider.

        Raise ConfigError if it lacks a required guarantee.
        """
        if promises_equal_bits(kind, cls, self._dtype):
            return
        if self._required:
            promised = ", ".join(sorted(cls.batch_invariant)) or "no dtype"
            raise ConfigError(
                f"batch_invariant=True with dtype={self._dtype!r} is not supported: the {kind} "
                f"{cls.__name__} supports batch invariance with {promised}. Choose "
                f"another dtype or {kind}, or "
                "remove batch_invariant."
            )
        self._without.append(f"{kind.replace('_', ' ')} {cls.__name__}")

    def add_attention(
        self, backend: type[AttentionBackend] | None, layers: Iterable[Attention], ops: type[Ops]
    ) -> None:
        """Add the attention backend, which was checked when it was selected, and the layers.

        Raise ConfigError if the guarantee is required, a layer has latent attention, and torch
        computes its operations instead of `ops`.
        """
        if backend is not None and not promises_equal_bits("attention", backend, self._dtype):
            self._without.append(f"attention backend {backend.name}")
        if any(layer.value_size for layer in layers):
            operations = LATENT_OPERATIONS | MIXED_OPERATIONS
            self._add_operations("multi-head latent attention", ops, operations)

    def add_states(
        self, ops: type[Ops], ranks: RankGroup, layers: Iterable[CacheLayer] = ()
    ) -> None:
        """Record whether the recurrent operations depend on the batch.

        layers: the model's layers. Recurrent layers name their other operations.
        Raise ConfigError if the guarantee is required, but torch computes an operation instead of
        `ops`, or several ranks share the model: torch may all-reduce the squares of their norms.
        """
        states = [layer for layer in layers if isinstance(layer, StateLayer)]
        others = {name for layer in states for name in layer.operations}
        self._add_operations("states", ops, STATE_OPERATIONS | MIXED_OPERATIONS | others)
        if ranks.size == 1:
            return
        if self._required:
            raise ConfigError(
                f"batch_invariant=True is not supported for recurrent models on {ranks.size} "
                "ranks, because torch computes the norms that they share. Choose "
                "tensor_parallel_size=1, or remove batch_invariant."
            )
        self._without.append(f"norms of states on {ranks.size} ranks")

    def add_activations(self, ops: type[Ops], modules: Iterable[nn.Module]) -> None:
        """Record whether the gated GELU of these modules depends on the batch.

        Raise ConfigError if the guarantee is required, but torch computes it instead of `ops`.
        """
        is_known = not promises_equal_bits("ops", ops, self._dtype)  # `add` has recorded the ops
        if not is_known and any(isinstance(module, GeluTanhAndMul) for module in modules):
            self._add_operations("gated GELU", ops, {"gelu_tanh_and_mul"})

    def _add_operations(self, part: str, ops: type[Ops], operations: Collection[str]) -> None:
        """Record whether `ops` guarantees these operations of a part of the model."""
        missing = sorted(set(operations) - (overridden_operations(ops) - ops.batch_dependent))
        if not missing and promises_equal_bits("ops", ops, self._dtype):
            return
        if self._required:
            lacks = f", which do not guarantee it for {', '.join(missing)}" if missing else ""
            raise ConfigError(
                f"batch_invariant=True is not supported for models with {part} and the ops "
                f"{ops.__name__}{lacks}. Choose other ops, or remove batch_invariant."
            )
        self._without.append(f"{part} of the model")

    def add_ranks(self, ranks: RankGroup) -> None:
        """Record whether the all-reduces of these ranks depend on the batch.

        If the guarantee is required, `join_ranks` has rejected such ranks.
        """
        if not ranks.batch_invariant:
            self._without.append(f"all-reduces over {ranks.size} ranks of a model")

    def report(self) -> None:
        """Warn if seeds are not reproducible in every batch with these plugins."""
        if self._without:
            logger.warning(
                "A seeded request may get different tokens when its batch contains other "
                "requests. These plugins do not guarantee bitwise equal results in every batch "
                "with dtype %s: %s. Set batch_invariant=True to accept only plugins with this "
                "guarantee.",
                self._dtype,
                ", ".join(self._without),
            )
