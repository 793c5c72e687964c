"""The store: pages by key, within a number of bytes, the longest unused dropped first.

One for all engines of the process that compute the same; it lives as long as one of them does.
Depends on no cache and no plan. Pages are tensors that it only holds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import Any
from weakref import WeakSet, WeakValueDictionary

Pages = Sequence[Any]
"""What one block keeps in each buffer: uint8 tensors [P], not on the device."""


class Feed:
    """What has come and gone in a store since somebody looked last."""

    def __init__(self) -> None:
        self.news: dict[bytes, bool] = {}


class BlockStore:
    """Keeps pages. May be used from several threads.

    capacity_bytes: of all pages together; what is larger alone is not kept.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._lock = Lock()
        self._blocks: OrderedDict[bytes, Pages] = OrderedDict()
        self._num_bytes = 0
        self._feeds: WeakSet[Feed] = WeakSet()

    @property
    def num_bytes(self) -> int:
        """Bytes that are kept."""
        return self._num_bytes

    def attach(self) -> Feed:
        """Return a feed that begins with all that is there; it ends when nobody has it."""
        with self._lock:
            feed = Feed()
            feed.news = dict.fromkeys(self._blocks, True)
            self._feeds.add(feed)
            return feed

    def take_news(self, feed: Feed) -> dict[bytes, bool]:
        """Return, by key, whether it is there, for what has changed; begin again."""
        with self._lock:
            news, feed.news = feed.news, {}
            return news

    def put(self, key: bytes, pages: Pages) -> None:
        """Keep the pages of a block; what is there already stays."""
        size = _size(pages)
        with self._lock:
            if key in self._blocks or size > self.capacity_bytes:
                return
            while self._num_bytes + size > self.capacity_bytes:
                oldest, dropped = self._blocks.popitem(last=False)
                self._num_bytes -= _size(dropped)
                self._tell(oldest, is_there=False)
            self._blocks[key] = pages
            self._num_bytes += size
            self._tell(key, is_there=True)

    def get(self, key: bytes) -> Pages | None:
        """Return the pages of a block, None if it is gone."""
        with self._lock:
            pages = self._blocks.get(key)
            if pages is not None:
                self._blocks.move_to_end(key)
            return pages

    def _tell(self, key: bytes, *, is_there: bool) -> None:
        for feed in self._feeds:
            feed.news[key] = is_there


_STORES: WeakValueDictionary[str, BlockStore] = WeakValueDictionary()
_STORES_LOCK = Lock()


def shared_store(name: str, capacity_bytes: int) -> BlockStore:
    """Return the process's store of this name; the first who asks says how much it holds."""
    with _STORES_LOCK:
        store = _STORES.get(name)
        if store is None:
            store = _STORES[name] = BlockStore(capacity_bytes)
        return store


def _size(pages: Pages) -> int:
    return sum(page.nbytes for page in pages)
