"""Record the native operations of one thread while they run, and replay them.

A recording keeps a copy of each operation's struct. The caller must keep the memory that the
structs point to at the same addresses for as long as the recording may be replayed.
"""

from __future__ import annotations

import ctypes

from dovetail_cpu_kernels.library import library


class Recording:
    """Records the operations that are called in a `with` block, on its thread. Blocks do not nest.

    num_calls: the number of recorded operations, set at the end of the block.
    """

    def __init__(self) -> None:
        self._library = library()
        self._calls: int | None = None
        self.num_calls = 0

    def __enter__(self) -> Recording:
        """Start recording."""
        self._library.dk_record_begin()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop recording. Raise MemoryError if there was not enough memory for the recording."""
        num_calls = ctypes.c_int64(0)
        self._calls = self._library.dk_record_end(ctypes.byref(num_calls))
        self.num_calls = num_calls.value
        if self._calls is None:
            raise MemoryError("there is not enough memory to record a step")

    def replay(self) -> None:
        """Run all operations again, in order, with the current contents of their memory."""
        self._library.dk_replay(self._calls, self.num_calls)

    def __del__(self) -> None:
        if self.__dict__.get("_calls") is not None:
            self._library.dk_record_free(self._calls)
