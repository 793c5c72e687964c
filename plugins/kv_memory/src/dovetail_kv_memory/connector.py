"""The connector: its options, its scheduler side and its worker side.

The sides exchange instructions and reports as JSON. The scheduler side learns only from the reports
which keys each rank has stored, so it also works in another process. A report lists a key only
after its pages are stored. If a key is dropped before its load, the load fails.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from dovetail.interfaces import KVConnector, KVConnectorContext, KVOutcome, KVTransfer
from dovetail_kv_memory.store import BlockStore, shared_store


class MemoryOptions(BaseModel):
    """The options, given as `plugin_options={"memory": {…}}`.

    capacity_bytes: the maximum size of all stored blocks. asynchronous: if True, a request waits
    for its blocks while steps of other requests run; if False, the step waits for the blocks.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    capacity_bytes: int = Field(default=1 << 30, ge=0)
    asynchronous: bool = False


class MemoryConnector(KVConnector):
    """Stores blocks in the memory of the worker's process."""

    CONTRACT_VERSION: ClassVar[str] = "0.8"
    options_model: ClassVar[type[BaseModel]] = MemoryOptions

    @staticmethod
    def create_scheduler_side(context: KVConnectorContext) -> MemorySchedulerSide:
        """Return the scheduler side."""
        num_ranks = context.config.tensor_parallel_size
        return MemorySchedulerSide(_options(context), num_ranks)

    @staticmethod
    def create_worker_side(context: KVConnectorContext) -> MemoryWorkerSide:
        """Return the worker side for the rank `context.rank`."""
        store = shared_store(_store_name(context), _options(context).capacity_bytes)
        return MemoryWorkerSide(store, _options(context))


class MemorySchedulerSide:
    """Implements `KVSchedulerSide`."""

    def __init__(self, options: MemoryOptions, num_ranks: int) -> None:
        self._asynchronous = options.asynchronous
        self._known: list[set[bytes]] = [set() for _ in range(num_ranks)]
        self._transfers: list[dict[str, Any]] = []

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether all ranks have stored it, according to their last reports."""
        if len(self._known) == 1:
            known = self._known[0]
            return [key in known for key in keys]
        return [all(key in known for known in self._known) for key in keys]

    def load(self, transfer: KVTransfer) -> bool:
        """Queue a load. Return whether the request must wait for the load."""
        self._transfers.append(_encoded("load", transfer))
        return self._asynchronous

    def store(self, transfer: KVTransfer) -> bool:
        """Queue a store. Return True, because every store is accepted."""
        self._transfers.append(_encoded("store", transfer))
        return True

    def take_instructions(self) -> bytes:
        """Return the loads and stores queued since the last call, as JSON."""
        transfers, self._transfers = self._transfers, []
        return json.dumps(transfers).encode() if transfers else b""

    def update(self, report: bytes, rank: int = 0) -> KVOutcome:
        """Update the known keys of a rank. Return the transfers that have ended on this rank."""
        if not report:
            return KVOutcome()
        decoded = json.loads(report)
        self._known[rank].update(map(bytes.fromhex, decoded["added"]))
        self._known[rank].difference_update(map(bytes.fromhex, decoded["dropped"]))
        failed = {int(number): tuple(blocks) for number, blocks in decoded["failed"].items()}
        return KVOutcome(done=tuple(decoded["done"]), failed=failed)

    def shutdown(self) -> None:
        """Clear the known keys and the queued transfers."""
        for known in self._known:
            known.clear()
        self._transfers.clear()


class MemoryWorkerSide:
    """Implements `KVWorkerSide`."""

    def __init__(self, store: BlockStore, options: MemoryOptions) -> None:
        self._store: BlockStore | None = store
        self._feed = store.attach()
        self._threads = ThreadPoolExecutor(1) if options.asynchronous else None
        self._pages_NP: Sequence[Any] = ()
        self._stores: list[dict[str, Any]] = []
        self._loads: dict[int, Future[list[int]]] = {}
        self._done: list[int] = []
        self._failed: dict[int, list[int]] = {}

    def register(self, pages_NP: Sequence[Any]) -> None:
        """Receive the memory of the KV cache: uint8 tensors [N, P]."""
        self._pages_NP = tuple(pages_NP)

    def begin(self, instructions: bytes) -> None:
        """Run the loads, or start them in a thread. The stores are queued until `finish`."""
        for transfer in json.loads(instructions) if instructions else ():
            if transfer["what"] == "store":
                self._stores.append(transfer)
            elif self._threads is None:
                self._settle(transfer["number"], self._load(transfer))
            else:
                self._loads[transfer["number"]] = self._threads.submit(self._load, transfer)

    def finish(self) -> bytes:
        """Run the queued stores. Return ended transfers and changed keys since the last step."""
        stores, self._stores = self._stores, []
        for transfer in stores:
            self._save(transfer)
        for number in [number for number, load in self._loads.items() if load.done()]:
            self._settle(number, self._loads.pop(number).result())
        changes = self._store.take_changes(self._feed) if self._store is not None else {}
        done, self._done = self._done, []
        failed, self._failed = self._failed, {}
        if not (changes or done or failed):
            return b""
        report = {
            "added": [key.hex() for key, is_stored in changes.items() if is_stored],
            "dropped": [key.hex() for key, is_stored in changes.items() if not is_stored],
            "done": done,
            "failed": failed,
        }
        return json.dumps(report).encode()

    def shutdown(self) -> None:
        """Wait for running loads, then release the KV cache and the store."""
        if self._threads is not None:
            self._threads.shutdown()
        self._pages_NP, self._store = (), None
        self._loads.clear()
        self._stores.clear()

    def _load(self, transfer: dict[str, Any]) -> list[int]:
        """Copy the pages of each key to its block. Return the blocks with missing pages."""
        assert self._store is not None, "begin must not be called after shutdown"
        missing = []
        for key, block in zip(transfer["keys"], transfer["blocks"], strict=True):
            pages = self._store.get(bytes.fromhex(key))
            if pages is None:
                missing.append(block)
                continue
            for cache_NP, page_P in zip(self._pages_NP, pages, strict=True):
                cache_NP[block].copy_(page_P)
        return missing

    def _save(self, transfer: dict[str, Any]) -> None:
        assert self._store is not None, "finish must not be called after shutdown"
        for key, block in zip(transfer["keys"], transfer["blocks"], strict=True):
            pages = [cache_NP[block].to("cpu", copy=True) for cache_NP in self._pages_NP]
            self._store.put(bytes.fromhex(key), pages)
        self._settle(transfer["number"], [])

    def _settle(self, number: int, missing: list[int]) -> None:
        if missing:
            self._failed[number] = missing
        else:
            self._done.append(number)


def _options(context: KVConnectorContext) -> MemoryOptions:
    return MemoryOptions(**context.options)  # type: ignore[arg-type]  # already validated


def _encoded(what: str, transfer: KVTransfer) -> dict[str, Any]:
    return {
        "what": what,
        "number": transfer.transfer_id,
        "keys": [key.hex() for key in transfer.keys],
        "blocks": transfer.block_ids,
    }


def _store_name(context: KVConnectorContext) -> str:
    """Return a name that is the same only for engines with interchangeable pages.

    The key of a page depends on the tokens. This name depends on everything else that affects the
    content of a page, such as the model, the dtypes and the layout.
    """
    config = context.config
    settings = (
        config.model.model_copy(update={"max_model_len": 0}),
        config.compute.model_copy(update={"num_threads": None}),
        config.load,
        (config.platform, config.worker_cls, config.tensor_parallel_size),
        config.cache.kv_cache_dtype,
        context.kv_cache.groups,
        context.rank,
    )
    return sha256(repr(settings).encode()).hexdigest()
