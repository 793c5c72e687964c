"""Shared memory between the ranks of one machine, for tensors too large for a socket's buffer.

Each rank writes to its own memory, which all other ranks map and read. Collective operations
alternate between two slots. A slot may be reused when all ranks have reported that they started the
last collective operation, because they have then finished the previous operation, which used the
slot. This module does not depend on tensors or collective operations.
"""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Mapping

from dovetail.transport.ring_memory import anonymous_file

SLOT_BYTES = 16 << 20
_NUM_BYTES = 2 * SLOT_BYTES


def share_memory(ends: Mapping[int, socket.socket], rank: int) -> list[mmap.mmap]:
    """Return the memory of every rank, in rank order. Pages are allocated on first write.

    ends: a connected socket to each other rank. Raises OSError if a rank has exited or does not
    send its memory.
    """
    own = anonymous_file(_NUM_BYTES)
    try:
        for end in ends.values():
            socket.send_fds(end, [b"m"], [own])
        shared = {rank: mmap.mmap(own, _NUM_BYTES)}
    finally:
        os.close(own)
    for other, end in ends.items():
        _, descriptors, _, _ = socket.recv_fds(end, 1, 1)
        if not descriptors:
            raise ConnectionError(f"rank {other} has not sent its shared memory")
        try:
            shared[other] = mmap.mmap(descriptors[0], _NUM_BYTES)
        finally:
            os.close(descriptors[0])
    return [shared[rank] for rank in sorted(shared)]
