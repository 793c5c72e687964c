"""The contract of a KV connector: blocks of the KV cache from and to elsewhere.

Two sides that share no object, because they may live in two processes. The scheduler's side knows
what is to be had and notes what is wanted; the worker's side moves bytes. What passes between them
are bytes of the connector's own making: instructions travel with a plan, answers with its result.

Contract. A block is named by its key: the hash of everything that it stands on, so that equal keys
mean equal contents in engines of the same model. Loads and stores name transfers by a number; every
transfer ends in exactly one outcome, and until then nobody else is given its blocks. A load that
fails costs a recomputation, never an answer. Nothing here waits but the worker's `begin`. With
several ranks each has a worker's side of its own, which moves its rank's part of every block: all
are given the same instructions, and each ends every transfer.

A load that has not ended `kv_transfer_timeout_s` (an engine option) seconds after `load` counts as
failed, and a transfer that has not ended after twice that time is given up: its blocks are given to
others, and its outcome is ignored. The worker's side must not read or write them from then on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from dovetail.interfaces.kv_cache import KVCacheConfig

if TYPE_CHECKING:
    from dovetail.interfaces.engine_config import WorkerConfig


@dataclass(frozen=True, kw_only=True)
class KVConnectorContext:
    """All that either side is made from.

    config: what decides the contents of a block: the workers' part of the configuration.
    options: the plugin's own, validated.
    """

    config: WorkerConfig
    kv_cache: KVCacheConfig
    rank: int = 0
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransfer:
    """Blocks of one request to be loaded or stored: what keys[i] names is, or belongs, in block i.

    transfer_id: unique in the scheduler's life. keys, block_ids: of equal length, at least one.
    """

    transfer_id: int
    request_id: str
    keys: tuple[bytes, ...]
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVOutcome:
    """Transfers that have ended.

    done: in full. failed: transfer id to its blocks, at least one, that are not as they should be.
    A load that failed has spoilt no other block than its own.
    """

    done: tuple[int, ...] = ()
    failed: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


class KVSchedulerSide(Protocol):
    """Lives beside the scheduler; no tensors. Called between steps, by one thread."""

    def has(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Return for each key whether its content could be loaded, on every rank.

        Changes nothing.
        """

    def load(self, transfer: KVTransfer) -> bool:
        """Note that these blocks are to be loaded with the next plan; return whether that takes.

        False: they are there before the forward pass of that plan, and the request may run in it.
        True: the request is held back until the outcome says so.
        """

    def store(self, transfer: KVTransfer) -> bool:
        """Note that these blocks may be stored with the next plan; return whether they will be.

        Their contents are there when that plan is executed. If so, they stay as they are until the
        outcome; else there is none.
        """

    def take_instructions(self) -> bytes:
        """Return what the worker's side has to do with the next plan, b"" for nothing."""

    def update(self, answer: bytes, rank: int = 0) -> KVOutcome:
        """Take in what the worker's side of a rank answered to a plan; return what ended there.

        Called for every rank, in order, whenever one of them answers anything. The engine puts the
        ranks together: a transfer has ended when it has on all, its failed blocks are those of all.
        """

    def shutdown(self) -> None:
        """Let go of everything. May be called twice."""


class KVWorkerSide(Protocol):
    """Lives in a worker and moves bytes. Called around each forward pass."""

    def register(self, pages_NP: Sequence[Any]) -> None:
        """Take the cache's memory, once, before any step: one tensor a buffer, uint8 [N, P].

        Row b of all buffers is block b, whatever stands in it; they are the worker's, and only the
        blocks of transfers may be read or written. N blocks, P bytes of a page.
        """

    def begin(self, instructions: bytes) -> None:
        """Begin what came with a plan, before its forward pass, and end the loads that do not take.

        Called with every plan, b"" too, so that what takes longer continues.
        """

    def finish(self) -> bytes:
        """Return, after the forward pass, the answer for the scheduler's side, b"" for none."""

    def shutdown(self) -> None:
        """Let go of everything; nothing is written to the cache after it. May be called twice."""


class KVConnector(ABC):
    """Makes the two sides; it is never instantiated itself."""

    CONTRACT: ClassVar[str] = "kv_connector"
    CONTRACT_VERSION: ClassVar[str] = "0.5"

    @staticmethod
    @abstractmethod
    def create_scheduler_side(context: KVConnectorContext) -> KVSchedulerSide:
        """Return the scheduler's side."""

    @staticmethod
    @abstractmethod
    def create_worker_side(context: KVConnectorContext) -> KVWorkerSide:
        """Return the side of the worker of `context.rank`."""
