"""Moves KV blocks from prefill replicas to decode replicas, through the KV connector contract.

A prefill replica stores its full blocks. A decode replica loads the stored blocks of a request, one
request after another over its link, and computes the rest of the prompt itself. As with any
connector, a request that waits for its load has blocks but no batch slot.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from dovetail.interfaces import KVOutcome, KVTransfer

MAX_STORED_BLOCKS = 2**19
"""Maximum number of stored blocks; the oldest blocks are forgotten first."""


@dataclass(frozen=True, kw_only=True)
class TransferCost:
    """The time of a transfer: a latency, and a time per token.

    ps_per_token: picoseconds. The default corresponds to 128 KiB per token at 50 GB/s.
    """

    latency_ns: int = 1_000_000
    ps_per_token: int = 2_600_000

    def time_ns(self, num_tokens: int) -> int:
        """Return the duration of the transfer of `num_tokens` tokens."""
        return self.latency_ns + num_tokens * self.ps_per_token // 1000


class StoredBlocks:
    """The keys of the blocks that can be loaded."""

    def __init__(self) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def add(self, keys: Sequence[bytes]) -> None:
        """Store blocks. The oldest blocks above the limit are forgotten."""
        for key in keys:
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > MAX_STORED_BLOCKS:
            self._keys.popitem(last=False)

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys


class PrefillSide:
    """The scheduler side of a prefill replica: it stores every full block, and loads nothing."""

    def __init__(self, stored: StoredBlocks) -> None:
        self._stored = stored

    def has(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Return False for each key, because a prefill replica loads nothing."""
        return [False] * len(keys)

    def load(self, transfer: KVTransfer) -> bool:
        """Raise NotImplementedError, because `has` finds no block."""
        raise NotImplementedError

    def store(self, transfer: KVTransfer) -> bool:
        """Store the blocks immediately.

        Return False, because the scheduler need not keep the blocks for a transfer.
        """
        self._stored.add(transfer.keys)
        return False

    def take_instructions(self) -> bytes:
        """Return no instructions."""
        return b""

    def update(self, answer: bytes, rank: int = 0) -> KVOutcome:
        """Return no outcomes, because there are no transfers."""
        return KVOutcome()

    def shutdown(self) -> None:
        """Do nothing."""


class DecodeSide:
    """The scheduler side of a decode replica: it loads stored blocks, and stores nothing.

    Instructions are pairs of int64: the id of a transfer and its number of blocks. Outcomes are ids
    as int64.
    """

    def __init__(self, stored: StoredBlocks) -> None:
        self._stored = stored
        self._instructions = array("q")

    def has(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Return whether each block is stored."""
        return [key in self._stored for key in keys]

    def load(self, transfer: KVTransfer) -> bool:
        """Begin a load with the next plan. Return True, because the request waits for it."""
        self._instructions.extend((transfer.transfer_id, len(transfer.keys)))
        return True

    def store(self, transfer: KVTransfer) -> bool:
        """Return False, because a decode replica stores nothing."""
        return False

    def take_instructions(self) -> bytes:
        """Return the loads that begin with the next plan."""
        instructions, self._instructions = self._instructions, array("q")
        return instructions.tobytes()

    def update(self, answer: bytes, rank: int = 0) -> KVOutcome:
        """Return the loads that have ended."""
        return KVOutcome(done=tuple(array("q", answer)))

    def shutdown(self) -> None:
        """Do nothing."""


class TransferLink:
    """The link of a decode replica. It transfers the blocks of one request after another."""

    def __init__(self, cost: TransferCost, block_size: int) -> None:
        self._cost = cost
        self._block_size = block_size
        self._free_ns = 0
        self._ends: deque[tuple[int, int]] = deque()

    def begin(self, instructions: bytes, now_ns: int) -> None:
        """Queue the loads of a plan."""
        numbers = array("q", instructions)
        for transfer_id, num_blocks in zip(numbers[::2], numbers[1::2], strict=True):
            start_ns = max(now_ns, self._free_ns)
            self._free_ns = start_ns + self._cost.time_ns(num_blocks * self._block_size)
            self._ends.append((self._free_ns, transfer_id))

    def take_ended(self, now_ns: int) -> bytes:
        """Return the ids of the loads that have ended, int64."""
        ended = array("q")
        while self._ends and self._ends[0][0] <= now_ns:
            ended.append(self._ends.popleft()[1])
        return ended.tobytes()
