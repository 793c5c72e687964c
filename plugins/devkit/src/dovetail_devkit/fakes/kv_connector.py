"""A fake KV connector that keeps copies of blocks in a dictionary.

The worker side uses only methods of tensors, and does not import torch. Every second load ends one
step after its plan, so that both synchronous and asynchronous loads occur.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, ClassVar

from dovetail.interfaces.kv_connector import (
    KVConnector,
    KVConnectorContext,
    KVOutcome,
    KVTransfer,
)


class FakeSchedulerSide:
    """Tracks the keys that each rank has stored. Implements `KVSchedulerSide`."""

    def __init__(self, num_ranks: int = 1) -> None:
        self.known: list[set[bytes]] = [set() for _ in range(num_ranks)]
        self._orders: list[dict[str, Any]] = []
        self._num_loads = 0

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether every rank has stored it."""
        return [all(key in known for known in self.known) for key in keys]

    def load(self, transfer: KVTransfer) -> bool:
        """Record a load. Every second load is asynchronous."""
        self._num_loads += 1
        waits = not self._num_loads % 2
        self._note("later" if waits else "load", transfer)
        return waits

    def store(self, transfer: KVTransfer) -> bool:
        """Record a store."""
        self._note("store", transfer)
        return True

    def take_instructions(self) -> bytes:
        """Return the instructions since the last plan."""
        orders, self._orders = self._orders, []
        return json.dumps(orders).encode() if orders else b""

    def update(self, report: bytes, rank: int = 0) -> KVOutcome:
        """Process the report of a rank. Return the transfers that have ended on this rank."""
        if not report:
            return KVOutcome()
        content = json.loads(report)
        self.known[rank].update(map(bytes.fromhex, content["stored"]))
        failed = {int(number): tuple(blocks) for number, blocks in content["failed"].items()}
        return KVOutcome(done=tuple(content["done"]), failed=failed)

    def shutdown(self) -> None:
        """Delete the keys."""
        for known in self.known:
            known.clear()

    def _note(self, what: str, transfer: KVTransfer) -> None:
        keys = [key.hex() for key in transfer.keys]
        order = {"what": what, "number": transfer.transfer_id, "keys": keys}
        self._orders.append({**order, "blocks": transfer.block_ids})


class FakeWorkerSide:
    """Copies pages to a dictionary and back. Implements `KVWorkerSide`."""

    def __init__(self) -> None:
        self.kept: dict[str, list[Any]] = {}
        self._pages_NP: Sequence[Any] = ()
        self._after: list[dict[str, Any]] = []
        self._clear()

    def _clear(self) -> None:
        self._report: dict[str, Any] = {"stored": [], "done": [], "failed": {}}

    def register(self, pages_NP: Sequence[Any]) -> None:
        """Store references to the pages of the cache."""
        self._pages_NP = pages_NP

    def begin(self, instructions: bytes) -> None:
        """Execute the synchronous loads. `finish` executes all other transfers."""
        for order in json.loads(instructions) if instructions else ():
            if order["what"] == "load":
                self.load(order)
            else:
                self._after.append(order)

    def finish(self) -> bytes:
        """Execute stores and asynchronous loads. Return the transfers that have ended."""
        orders, self._after = self._after, []
        for order in orders:
            (self.save if order["what"] == "store" else self.load)(order)
        report = self._report
        self._clear()
        return json.dumps(report).encode() if any(report.values()) else b""

    def shutdown(self) -> None:
        """Release the cache."""
        self._pages_NP = ()

    def load(self, order: dict[str, Any]) -> None:
        """Copy the stored content to the blocks of a transfer."""
        missing = []
        for key, block in zip(order["keys"], order["blocks"], strict=True):
            if key in self.kept:
                for cache_NP, page_P in zip(self._pages_NP, self.kept[key], strict=True):
                    cache_NP[block].copy_(page_P)
            else:
                missing.append(block)
        self.end(order, missing)

    def save(self, order: dict[str, Any]) -> None:
        """Copy the blocks of a transfer to the dictionary."""
        for key, block in zip(order["keys"], order["blocks"], strict=True):
            self.kept[key] = [cache_NP[block].clone() for cache_NP in self._pages_NP]
            self._report["stored"].append(key)
        self.end(order, [])

    def end(self, order: dict[str, Any], missing: list[int]) -> None:
        """Record that a transfer has ended."""
        if missing:
            self._report["failed"][order["number"]] = missing
        else:
            self._report["done"].append(order["number"])


class FakeKVConnector(KVConnector):
    """A KV connector that keeps copies of blocks in the worker."""

    CONTRACT_VERSION: ClassVar[str] = "0.8"

    @staticmethod
    def create_scheduler_side(context: KVConnectorContext) -> FakeSchedulerSide:
        """Return the scheduler's side."""
        return FakeSchedulerSide(context.config.tensor_parallel_size)

    @staticmethod
    def create_worker_side(context: KVConnectorContext) -> FakeWorkerSide:
        """Return the worker's side."""
        return FakeWorkerSide()
