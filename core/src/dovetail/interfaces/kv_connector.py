"""The contract of a KV connector: it stores KV-cache blocks elsewhere and loads them back.

A connector has two sides that share no object, because they may run in two processes. The scheduler
side knows which blocks are stored and selects transfers. The worker side moves the bytes. They
exchange bytes in a format that the connector defines: instructions are sent with a plan, reports
with its result.

Contract: The key of a block is the hash of all tokens up to the end of
the block, so that equal keys mean equal
contents in engines of the same model. Every transfer ends with exactly one outcome; until then its
blocks are not given to other requests. After a failed load the tokens are recomputed; the
request does not fail. Only `KVWorkerSide.begin` may wait. With several ranks each rank has a worker
side, which moves its rank's part of every block. All ranks get the same instructions, and each ends
every transfer.

A load that has not ended `kv_transfer_timeout_s` (an engine option) seconds after `load` counts as
failed. A transfer that has not ended after twice that time is abandoned: its blocks are reused and
its outcome is ignored. The worker side must not read or write these blocks from then on.
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
    """Arguments of `create_scheduler_side` and `create_worker_side`.

    config: the workers' part of the configuration, which determines the contents of blocks.
    options: validated options of the connector plugin.
    """

    config: WorkerConfig
    kv_cache: KVCacheConfig
    rank: int = 0
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransfer:
    """Blocks of one request to load or store: keys[i] is the key of block block_ids[i].

    transfer_id: unique in a scheduler. keys and block_ids have equal lengths and at least one
    entry.
    """

    transfer_id: int
    request_id: str
    keys: tuple[bytes, ...]
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVOutcome:
    """Transfers that have ended.

    done: completely successful. failed: maps a transfer id to its blocks, at least one, with wrong
    content. A failed load must not change blocks of other transfers.
    """

    done: tuple[int, ...] = ()
    failed: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


class KVSchedulerSide(Protocol):
    """The side in the engine core. It has no tensors and is called between steps by one thread."""

    def has(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Return for each key whether its block can be loaded on every rank.

        Changes nothing.
        """

    def load(self, transfer: KVTransfer) -> bool:
        """Schedule a load with the next plan. Return whether it may take longer than `begin`.

        False: the blocks are loaded before the forward pass of that plan, and the request may run
        in it. True: the request waits for the outcome.
        """

    def store(self, transfer: KVTransfer) -> bool:
        """Schedule a store with the next plan, or decline it. Return whether it is scheduled.

        The blocks are computed when that plan is executed. If True is returned, they do not change
        until the outcome. If False is returned, no outcome follows.
        """

    def take_instructions(self) -> bytes:
        """Return the worker side's instructions for the next plan, or b"" for none."""

    def update(self, answer: bytes, rank: int = 0) -> KVOutcome:
        """Process the report of one rank's worker side. Return its ended transfers.

        If any rank reports, the method is called for every rank, in order. The engine
        combines the ranks: a transfer has ended when it has ended on all ranks, and a block has
        failed if it has failed on any rank.
        """

    def shutdown(self) -> None:
        """Release all resources. May be called more than once."""


class KVWorkerSide(Protocol):
    """The side in a worker, which moves the bytes. Called before and after each forward pass."""

    def register(self, pages_NP: Sequence[Any]) -> None:
        """Receive the KV cache, once, before any step: one tensor per buffer, uint8 [N, P].

        N blocks, P bytes of a page. Row b of all buffers is block b. The worker owns the memory;
        only the blocks of transfers may be read or written.
        """

    def begin(self, instructions: bytes) -> None:
        """Start the transfers of a plan before its forward pass, and complete the short loads.

        Short loads are those for which `KVSchedulerSide.load` returned False. Called with every
        plan, also with b"", so that long transfers make progress.
        """

    def finish(self) -> bytes:
        """Return the report for the scheduler side after the forward pass, or b"" for none."""

    def shutdown(self) -> None:
        """Release all resources. Do not access the cache afterwards. May be called repeatedly."""


class KVConnector(ABC):
    """Creates the scheduler side and the worker side. The class is never instantiated."""

    CONTRACT: ClassVar[str] = "kv_connector"
    CONTRACT_VERSION: ClassVar[str] = "0.8"

    @staticmethod
    @abstractmethod
    def create_scheduler_side(context: KVConnectorContext) -> KVSchedulerSide:
        """Return the scheduler side."""

    @staticmethod
    @abstractmethod
    def create_worker_side(context: KVConnectorContext) -> KVWorkerSide:
        """Return the worker side of `context.rank`."""
