"""Recording: the native operations of one thread, noted while they are done, and done again.

A recording keeps each operation's struct. It refuses to know what the structs point to: whoever
records keeps that memory where it is, for as long as the recording may be replayed.
"""

from __future__ import annotations

import ctypes

from dovetail_cpu_kernels.library import library


class Recording:
    """Operations called within the `with` block, on its thread. Blocks do not nest.

    num_calls: how many there were, after the block.
    """

    def __init__(self) -> None:
        self._library = library()
        self._calls: int | None = None
        self.num_calls = 0

    def __enter__(self) -> Recording:
        """Begin to note."""
        self._library.dk_record_begin()
        return self

    def __exit__(self, *_: object) -> None:
        """End; raise MemoryError where there is no room for what was noted."""
        num_calls = ctypes.c_int64(0)
        self._calls = self._library.dk_record_end(ctypes.byref(num_calls))
        self.num_calls = num_calls.value
        if self._calls is None:
            raise MemoryError("there is no memory for a recording")

    def replay(self) -> None:
        """Do all operations again, in their order, with what is in their memory now."""
        self._library.dk_replay(self._calls, self.num_calls)

    def __del__(self) -> None:
        if self.__dict__.get("_calls") is not None:
            self._library.dk_record_free(self._calls)
