# ruff: noqa: ANN001, ANN201  # annotations of kernels are read by Triton
"""Which token a program of a kernel for singles computes, and where its states are."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def locate_single(singles_ptr, reads_ptr, writes_ptr):
    """Return the token of this program's single, and the blocks that it reads and writes, int64.

    The number of the single is the program's index in the first dimension. The block that is read
    is negative if no state precedes the token. singles_ptr: `StatePlan.singles_S2`, or None.
    """
    single = tl.program_id(0)
    if singles_ptr is not None:
        token = tl.load(singles_ptr + 2 * single)
        part = tl.load(singles_ptr + 2 * single + 1)
    else:
        token = single
        part = single
    read = tl.load(reads_ptr + part).to(tl.int64)
    write = tl.load(writes_ptr + part).to(tl.int64)
    return token.to(tl.int64), read, write
