"""Allocates pages of lazily allocated memory in a background thread before they are needed.

The first write to a page waits for the system: up to milliseconds for a huge page, while all
threads of the team wait. The background thread stays a fixed number of bytes ahead of the used
rows, at the lowest priority and without the interpreter lock. It does not change the contents of
pages. Pages that it has not reached are allocated on first use, as usual.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Sequence

import torch

from dovetail.processes.thread_priority import lower_thread_priority

logger = logging.getLogger(__name__)

_PIECE_BYTES = 2 << 20  # a huge page
_MADV_POPULATE_WRITE = 23
"""`madvise` advice of Linux 5.14: allocates pages as a write would, without writing."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class PageSupply:
    """Keeps pages allocated for `ahead_bytes` beyond the last used row of the buffers.

    Called from one thread. Owns one thread, from the first `use` until `close`.
    """

    def __init__(self, buffers_NP: Sequence[torch.Tensor], ahead_bytes: int) -> None:
        """buffers_NP: uint8, equal numbers of rows, each contiguous. Kept alive until `close`."""
        self._buffers = buffers_NP
        # The thread calls no operation of torch: if the interpreter exits during one, C++ code
        # that releases the interpreter lock aborts the process.
        self._places = [(buffer_NP.data_ptr(), buffer_NP.stride(0)) for buffer_NP in buffers_NP]
        row_bytes = sum(buffer_NP.stride(0) for buffer_NP in buffers_NP)
        self._num_rows = min((len(buffer_NP) for buffer_NP in buffers_NP), default=0)
        self._rows_ahead = max(1, ahead_bytes // max(1, row_bytes))
        self._rows_at_once = max(1, _PIECE_BYTES * len(buffers_NP) // max(1, row_bytes))
        self._wanted = 0
        self._wake = threading.Semaphore(0)
        self._closing = False
        self._thread: threading.Thread | None = None

    def use(self, row: int) -> None:
        """Record that `row` is in use. Fast if enough pages beyond it are allocated."""
        if row + self._rows_ahead // 2 < self._wanted or self._wanted == self._num_rows:
            return
        self._wanted = min(self._num_rows, row + self._rows_ahead)
        if self._thread is None:
            thread = threading.Thread(target=self._supply, name="dovetail-page-supply", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the limit on threads may be reached
                logger.warning("Pages of the KV cache are not allocated ahead of use: %s.", error)
                self._wanted = self._num_rows
                return
            self._thread = thread
        self._wake.release()

    def close(self) -> None:
        """Stop the thread after it has allocated the current part. May be called twice."""
        self._closing = True
        self._wake.release()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _supply(self) -> None:
        lower_thread_priority()
        done = 0
        while not self._closing and done < self._num_rows:
            self._wake.acquire()
            while done < self._wanted and not self._closing:
                end = min(self._wanted, done + self._rows_at_once)
                parts = ((start + done * size, (end - done) * size) for start, size in self._places)
                if not all(_take(*part) for part in parts):
                    return
                done = end


def _take(address: int, num_bytes: int) -> bool:
    """Allocate the pages of a part. Return False if the system does not support it."""
    start = address // _PAGE_BYTES * _PAGE_BYTES
    if _libc.madvise(start, address + num_bytes - start, _MADV_POPULATE_WRITE) == 0:
        return True
    logger.info(
        "Pages of the KV cache are not allocated ahead of use: %s.", os.strerror(ctypes.get_errno())
    )
    return False
