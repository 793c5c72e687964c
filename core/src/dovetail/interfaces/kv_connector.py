"""A sketch of the contract of a KV connector: blocks of keys and values from and to elsewhere.

Version 0.x without an implementation: whoever writes the first one may still change it. The idea:
two sides that share no object, because they live in two processes. The scheduler's side says what
is to be had and decides; the worker's side moves bytes; what passes between them are bytes of the
connector's own making, which travel with the plan.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from dovetail.interfaces.kv_cache import KVCacheConfig

if TYPE_CHECKING:
    from dovetail.config import EngineConfig


@dataclass(frozen=True, kw_only=True)
class KVConnectorContext:
    """All that either side is made from."""

    config: EngineConfig
    kv_cache: KVCacheConfig
    rank: int = 0
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransfer:
    """Blocks of one request to be fetched or stored. block_hashes: their keys, in order.

    block_ids: where they are, or belong, in the cache of the engine.
    """

    request_id: str
    block_hashes: tuple[bytes, ...]
    block_ids: tuple[int, ...]


class KVSchedulerSide(Protocol):
    """Lives beside the scheduler; no tensors."""

    def num_matching_blocks(self, block_hashes: Sequence[bytes]) -> int:
        """Return how many of the blocks, from the first, could be fetched. Never waits."""

    def fetch(self, transfer: KVTransfer) -> None:
        """Note that these blocks are to be fetched with the next plan."""

    def store(self, transfer: KVTransfer) -> None:
        """Note that these blocks may be stored; they stay as they are until that is done."""

    def take_instructions(self) -> bytes:
        """Return what the worker's side has to do with the next plan, and begin anew."""

    def take_finished(self) -> tuple[Sequence[str], Sequence[str]]:
        """Return the requests whose fetches, and whose stores, have ended since the last call."""


class KVWorkerSide(Protocol):
    """Lives in a worker and moves bytes."""

    def register_caches(self, caches: Mapping[str, Any]) -> None:
        """Take the cache tensors of each layer, by its name."""

    def begin(self, instructions: bytes) -> None:
        """Begin what the scheduler's side asked for; before the forward pass."""

    def wait_for_layer(self, layer_name: str) -> None:
        """Return when the layer's fetched blocks are there."""

    def finish(self) -> bytes:
        """Return, after the forward pass, what the scheduler's side has to be told."""

    def shutdown(self) -> None:
        """Let go of everything. May be called twice."""


class KVConnector(ABC):
    """Makes the two sides. A fetch that fails costs a recomputation, never an answer."""

    CONTRACT: ClassVar[str] = "kv_connector"
    CONTRACT_VERSION: ClassVar[str] = "0.1"

    @staticmethod
    @abstractmethod
    def create_scheduler_side(context: KVConnectorContext) -> KVSchedulerSide:
        """Return the scheduler's side."""

    @staticmethod
    @abstractmethod
    def create_worker_side(context: KVConnectorContext) -> KVWorkerSide:
        """Return the side of the worker of `context.rank`."""
