"""The connector: its options, its two sides, and the bytes that pass between them.

Instructions and answers are JSON. The scheduler's side keeps a mirror of the keys in every rank's
store from the answers alone, so that it would work as well in another process; it is never notified
of a key before its pages are there, and a key that has gone meanwhile is a load that fails.
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

    capacity_bytes: kept at most. asynchronous: whether requests wait beside the steps of others
    until their blocks are loaded, instead of the step waiting for them.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    capacity_bytes: int = Field(default=1 << 30, ge=0)
    asynchronous: bool = False


class MemoryConnector(KVConnector):
    """Keeps blocks in the memory of the worker's process."""

    CONTRACT_VERSION: ClassVar[str] = "0.5"
    options_model: ClassVar[type[BaseModel]] = MemoryOptions

    @staticmethod
    def create_scheduler_side(context: KVConnectorContext) -> MemorySchedulerSide:
        """Return the scheduler's side."""
        num_ranks = context.config.tensor_parallel_size
        return MemorySchedulerSide(_options(context), num_ranks)

    @staticmethod
    def create_worker_side(context: KVConnectorContext) -> MemoryWorkerSide:
        """Return the side of the worker of `context.rank`."""
        store = shared_store(_store_name(context), _options(context).capacity_bytes)
        return MemoryWorkerSide(store, _options(context))


class MemorySchedulerSide:
    """Implements `KVSchedulerSide`."""

    def __init__(self, options: MemoryOptions, num_ranks: int) -> None:
        self._asynchronous = options.asynchronous
        self._known: list[set[bytes]] = [set() for _ in range(num_ranks)]
        self._orders: list[dict[str, Any]] = []

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether every rank's store had it when it answered last."""
        if len(self._known) == 1:
            known = self._known[0]
            return [key in known for key in keys]
        return [all(key in known for known in self._known) for key in keys]

    def load(self, transfer: KVTransfer) -> bool:
        """Note a load; return whether the request has to wait for it."""
        self._orders.append(_order("load", transfer))
        return self._asynchronous

    def store(self, transfer: KVTransfer) -> bool:
        """Note a store; there is always room."""
        self._orders.append(_order("store", transfer))
        return True

    def take_instructions(self) -> bytes:
        """Return the orders since the last plan."""
        orders, self._orders = self._orders, []
        return json.dumps(orders).encode() if orders else b""

    def update(self, answer: bytes, rank: int = 0) -> KVOutcome:
        """Bring the mirror of a rank's store up to date; return what has ended there."""
        if not answer:
            return KVOutcome()
        told = json.loads(answer)
        self._known[rank].update(map(bytes.fromhex, told["come"]))
        self._known[rank].difference_update(map(bytes.fromhex, told["gone"]))
        failed = {int(number): tuple(blocks) for number, blocks in told["failed"].items()}
        return KVOutcome(done=tuple(told["done"]), failed=failed)

    def shutdown(self) -> None:
        """Forget everything."""
        for known in self._known:
            known.clear()
        self._orders.clear()


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
        """Take the cache's memory: uint8 [N, P] tensors."""
        self._pages_NP = tuple(pages_NP)

    def begin(self, instructions: bytes) -> None:
        """Load what is requested, or begin to; note what is to be stored after the forward pass."""
        for order in json.loads(instructions) if instructions else ():
            if order["what"] == "store":
                self._stores.append(order)
            elif self._threads is None:
                self._settle(order["number"], self._load(order))
            else:
                self._loads[order["number"]] = self._threads.submit(self._load, order)

    def finish(self) -> bytes:
        """Store what is to be stored; return what has ended, come and gone since the last step."""
        stores, self._stores = self._stores, []
        for order in stores:
            self._save(order)
        for number in [number for number, load in self._loads.items() if load.done()]:
            self._settle(number, self._loads.pop(number).result())
        news = self._store.take_news(self._feed) if self._store is not None else {}
        done, self._done = self._done, []
        failed, self._failed = self._failed, {}
        if not (news or done or failed):
            return b""
        told = {
            "come": [key.hex() for key, is_there in news.items() if is_there],
            "gone": [key.hex() for key, is_there in news.items() if not is_there],
            "done": done,
            "failed": failed,
        }
        return json.dumps(told).encode()

    def shutdown(self) -> None:
        """Let go of the cache and of the store, after what is being loaded."""
        if self._threads is not None:
            self._threads.shutdown()
        self._pages_NP, self._store = (), None
        self._loads.clear()
        self._stores.clear()

    def _load(self, order: dict[str, Any]) -> list[int]:
        """Write the pages of each key to its block; return the blocks whose pages have gone."""
        assert self._store is not None, "nothing is asked for after the end"
        missing = []
        for key, block in zip(order["keys"], order["blocks"], strict=True):
            pages = self._store.get(bytes.fromhex(key))
            if pages is None:
                missing.append(block)
                continue
            for cache_NP, page_P in zip(self._pages_NP, pages, strict=True):
                cache_NP[block].copy_(page_P)
        return missing

    def _save(self, order: dict[str, Any]) -> None:
        assert self._store is not None, "nothing is asked for after the end"
        for key, block in zip(order["keys"], order["blocks"], strict=True):
            pages = [cache_NP[block].to("cpu", copy=True) for cache_NP in self._pages_NP]
            self._store.put(bytes.fromhex(key), pages)
        self._settle(order["number"], [])

    def _settle(self, number: int, missing: list[int]) -> None:
        if missing:
            self._failed[number] = missing
        else:
            self._done.append(number)


def _options(context: KVConnectorContext) -> MemoryOptions:
    return MemoryOptions(**context.options)  # type: ignore[arg-type]  # checked by its model


def _order(what: str, transfer: KVTransfer) -> dict[str, Any]:
    return {
        "what": what,
        "number": transfer.transfer_id,
        "keys": [key.hex() for key in transfer.keys],
        "blocks": transfer.block_ids,
    }


def _store_name(context: KVConnectorContext) -> str:
    """Return a name for all that decides what stands in a page of a given key, but the tokens.

    A key says nothing of the model, of the numbers that it is computed in, or of the layout.
    """
    config = context.config
    facts = (
        config.model.model_copy(update={"max_model_len": 0}),
        config.compute.model_copy(update={"num_threads": None}),
        config.load,
        (config.platform, config.worker_cls, config.tensor_parallel_size),
        config.cache.kv_cache_dtype,
        context.kv_cache.groups,
        context.rank,
    )
    return sha256(repr(facts).encode()).hexdigest()
