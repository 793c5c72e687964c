"""Find out whether the selected plugins make a request's tokens independent of other requests.

A plugin may guarantee, for some dtypes, that the result of a request is bitwise equal in every
batch. If one
plugin lacks the guarantee, a seeded request may get different tokens in another batch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from dovetail.errors import ConfigError
from dovetail.interfaces import AttentionBackend, LinearMethod, Ops, RankGroup
from dovetail.plugins.contracts.declared import promises_equal_bits
from dovetail_torch.layers.attention import Attention

logger = logging.getLogger(__name__)


class BatchInvariance:
    """Collects the plugins without the guarantee. Rejects them if the guarantee is required."""

    def __init__(self, dtype: str, *, required: bool) -> None:
        """dtype: dtype of the model. required: `EngineArgs.batch_invariant`."""
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
        self, backend: type[AttentionBackend] | None, layers: Iterable[Attention]
    ) -> None:
        """Add the attention backend and the layers. The backend's selection has checked it.

        Raise ConfigError if the guarantee is required and a layer has latent attention: torch
        multiplies its queries and results by weights.
        """
        if backend is not None and not promises_equal_bits("attention", backend, self._dtype):
            self._without.append(f"attention backend {backend.name}")
        if not any(layer.value_size for layer in layers):
            return
        if self._required:
            raise ConfigError(
                "batch_invariant=True is not supported for models with multi-head latent "
                "attention. Remove batch_invariant."
            )
        self._without.append("multi-head latent attention of the model")

    def add_states(self) -> None:
        """Record that the model has states, which torch computes.

        Raise ConfigError if the guarantee is required.
        """
        if self._required:
            raise ConfigError(
                "batch_invariant=True is not supported for models with states, such as linear "
                "attention. Remove batch_invariant."
            )
        self._without.append("states of the model")

    def add_ranks(self, ranks: RankGroup) -> None:
        """Record whether sums over ranks depend on the batch.

        If the guarantee is required, `join_ranks` has rejected such ranks.
        """
        if not ranks.batch_invariant:
            self._without.append(f"sums over {ranks.size} ranks of a model")

    def report(self) -> None:
        """Warn if seeds are not reproducible in every batch with these plugins."""
        if self._without:
            logger.warning(
                "A seeded request may get different tokens when its batch contains other "
                "requests. These plugins do not guarantee equal bits in every batch with dtype %s: "
                "%s. Set batch_invariant=True to accept only plugins with this guarantee.",
                self._dtype,
                ", ".join(self._without),
            )
