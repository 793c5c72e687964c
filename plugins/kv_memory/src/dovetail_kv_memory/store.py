"""The store maps keys to pages. If it is full, it removes the least recently used pages.

All engines of the process with interchangeable pages share one store. The store is freed when the
last of these engines shuts down. This module does not depend on the KV cache or on plans, and does
not read the pages.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import Any
from weakref import WeakSet, WeakValueDictionary

Pages = Sequence[Any]
"""The pages of one block, one for each buffer: uint8 tensors [P] in host memory."""


class Feed:
    """The changes of a store since the changes were last read.

    Maps each changed key to whether the key is stored now.
    """

    def __init__(self) -> None:
        self.changes: dict[bytes, bool] = {}


class BlockStore:
    """Stores pages by key. Thread-safe.

    capacity_bytes: the maximum size of all pages. A block larger than this is not stored.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._lock = Lock()
        self._blocks: OrderedDict[bytes, Pages] = OrderedDict()
        self._num_bytes = 0
        self._feeds: WeakSet[Feed] = WeakSet()

    @property
    def num_bytes(self) -> int:
        """The size of all stored pages, in bytes."""
        return self._num_bytes

    def attach(self) -> Feed:
        """Return a new feed that starts with all stored keys. The caller must keep a reference."""
        with self._lock:
            feed = Feed()
            feed.changes = dict.fromkeys(self._blocks, True)
            self._feeds.add(feed)
            return feed

    def take_changes(self, feed: Feed) -> dict[bytes, bool]:
        """Return and clear the changes of a feed: for each key, whether it is stored now."""
        with self._lock:
            changes, feed.changes = feed.changes, {}
            return changes

    def put(self, key: bytes, pages: Pages) -> None:
        """Store the pages of a block, unless the key is already stored."""
        size = _size(pages)
        with self._lock:
            if key in self._blocks or size > self.capacity_bytes:
                return
            while self._num_bytes + size > self.capacity_bytes:
                oldest, dropped = self._blocks.popitem(last=False)
                self._num_bytes -= _size(dropped)
                self._notify(oldest, is_stored=False)
            self._blocks[key] = pages
            self._num_bytes += size
            self._notify(key, is_stored=True)

    def get(self, key: bytes) -> Pages | None:
        """Return the pages of a block, or None if they are not stored."""
        with self._lock:
            pages = self._blocks.get(key)
            if pages is not None:
                self._blocks.move_to_end(key)
            return pages

    def _notify(self, key: bytes, *, is_stored: bool) -> None:
        for feed in self._feeds:
            feed.changes[key] = is_stored


_STORES: WeakValueDictionary[str, BlockStore] = WeakValueDictionary()
_STORES_LOCK = Lock()


def shared_store(name: str, capacity_bytes: int) -> BlockStore:
    """Return the store with this name in this process. The first call sets its capacity."""
    with _STORES_LOCK:
        store = _STORES.get(name)
        if store is None:
            store = _STORES[name] = BlockStore(capacity_bytes)
        return store


def _size(pages: Pages) -> int:
    return sum(page.nbytes for page in pages)
