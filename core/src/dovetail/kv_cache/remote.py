"""Manages loads and stores of a KV connector for the scheduler.

It connects the KV cache manager with the connector's scheduler side. Blocks in transfer are pinned,
so that they stay in use if their request ends. A transfer that times out is abandoned: its request
immediately continues without it. The blocks are freed later, when the worker side must no longer
use them. The scheduler sends the instructions and receives the reports.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from dovetail.clock import Clock
from dovetail.interfaces.kv_connector import KVSchedulerSide, KVTransfer
from dovetail.kv_cache.hit import Hit
from dovetail.kv_cache.manager import KVCacheManager
from dovetail.request import Request

logger = logging.getLogger(__name__)


class RemoteCache:
    """The transfers between one scheduler and one connector.

    num_loaded_blocks, num_stored_blocks, num_failed_loads: totals.
    num_given_up: total of transfers that timed out.
    """

    def __init__(
        self, side: KVSchedulerSide, kv_cache: KVCacheManager, *, clock: Clock, timeout_s: float
    ) -> None:
        """Start without transfers.

        timeout_s: time after which a load fails. After twice this time its blocks are freed.
        """
        self.num_loaded_blocks = 0
        self.num_stored_blocks = 0
        self.num_failed_loads = 0
        self.num_given_up = 0
        self._clock = clock
        self._timeout_ns = int(timeout_s * 1e9)
        self._begun_ns: dict[int, int] = {}  # transfers within the timeout, oldest first
        self._late_ns: dict[int, int] = {}  # abandoned transfers, oldest first
        self._side = side
        self._kv_cache = kv_cache
        self._next_id = 0
        self._blocks: dict[int, Sequence[int]] = {}  # pinned blocks of each unfinished transfer
        self._loads: dict[int, Request | None] = {}  # None if the request was released
        self._load_of: dict[str, int] = {}
        self._num_offered: dict[str, int] = {}
        self._let_down: set[str] = set()

    @property
    def num_transfers(self) -> int:
        """Number of unfinished transfers. While it is not 0, plans must be executed, even empty."""
        return len(self._blocks)

    def lookup(self, request: Request) -> Hit:
        """Return the result of `KVCacheManager.lookup`, with loadable blocks as `missing`.

        A request whose load has failed only finds local blocks.
        """
        if request.request_id in self._let_down:
            return self._kv_cache.lookup(request)
        return self._kv_cache.lookup(request, self._side.has)

    def load(self, request: Request, hit: Hit) -> bool:
        """Load the missing blocks of `hit`, with which the request was admitted.

        Returns whether the request must wait for the load; otherwise it may run in the next plan.
        In both cases `update` reports the end of the load, unless the request is released earlier.
        """
        if not hit.missing:
            return False
        num_hashes = hit.num_tokens // self._kv_cache.block_size
        keys = dict(self._kv_cache.named_blocks(request, 0, num_hashes))
        blocks = [request.blocks[group][position] for group, position in hit.missing]
        transfer = self._begin(request, blocks, [keys[block] for block in blocks])
        self._loads[transfer.transfer_id] = request
        self._load_of[request.request_id] = transfer.transfer_id
        return self._side.load(transfer)

    def offer(self, request: Request) -> None:
        """Offer the connector the blocks that the request has committed since the last call."""
        start = self._num_offered.get(request.request_id, 0)
        end = request.num_committed_blocks
        if end <= start:
            return
        self._num_offered[request.request_id] = end
        named = self._kv_cache.named_blocks(request, start, end)
        there = self._side.has([key for _, key in named])
        missing = [pair for pair, is_there in zip(named, there, strict=True) if not is_there]
        if not missing:
            return
        blocks = [block for block, _ in missing]
        transfer = self._begin(request, blocks, [key for _, key in missing])
        if not self._side.store(transfer):
            self._end(transfer.transfer_id)

    def release(self, request: Request, *, finished: bool) -> None:
        """Offer the connector the blocks of a request, which will be freed next.

        finished: whether the request has ended.
        """
        self.offer(request)
        transfer_id = self._load_of.pop(request.request_id, None)
        if transfer_id is not None and finished:
            self._loads[transfer_id] = None
        if finished:
            self._num_offered.pop(request.request_id, None)
            self._let_down.discard(request.request_id)

    def take_instructions(self) -> bytes:
        """Return the instructions to send with the next plan."""
        return self._side.take_instructions()

    def update(self, answer: bytes) -> list[tuple[Request, bool]]:
        """Process a worker's report. Return requests whose loads ended, and whether they succeeded.

        Successful loads are committed. For failed loads the caller must drop the sampled tokens,
        free the request and let it wait again. A request that has already freed its blocks is only
        reported if its sampled tokens must be dropped.
        """
        outcome = self._side.update(answer)
        ended = {**dict.fromkeys(outcome.done, ()), **outcome.failed}
        settled = [self._settle(transfer_id, failed) for transfer_id, failed in ended.items()]
        return [entry for entry in settled if entry is not None]

    def cancel_late_loads(self) -> list[tuple[Request, bool]]:
        """Abandon transfers that timed out. Return their loads in the form that `update` returns.

        Requests do not wait for them any longer. Their blocks stay pinned until twice the timeout
        or the end of the transfer, because they may still be written.
        """
        now_ns, given_up = self._clock.now_ns(), []
        while (transfer_id := _first_before(self._begun_ns, now_ns - self._timeout_ns)) is not None:
            self._late_ns[transfer_id] = self._begun_ns.pop(transfer_id)
            self._report_late(transfer_id)
            if self._loads.get(transfer_id) is not None:
                given_up.append(self._settle_load(transfer_id, self._blocks[transfer_id]))
                self._loads[transfer_id] = None
        limit_ns = now_ns - 2 * self._timeout_ns
        while (transfer_id := _first_before(self._late_ns, limit_ns)) is not None:
            self._end(transfer_id)
        return [entry for entry in given_up if entry is not None]

    def _report_late(self, transfer_id: int) -> None:
        self.num_given_up += 1
        if self.num_given_up == 1:
            logger.warning(
                "A transfer of %d KV blocks has not ended after kv_transfer_timeout_s=%g and is "
                "abandoned; waiting requests compute the tokens instead. Later timeouts are only "
                "counted.",
                len(self._blocks[transfer_id]),
                self._timeout_ns / 1e9,
            )

    def shutdown(self) -> None:
        """Shut down the connector and unpin all blocks. May be called more than once."""
        self._side.shutdown()
        for transfer_id in list(self._blocks):
            self._end(transfer_id)
        self._loads.clear()
        self._load_of.clear()

    def _settle(self, transfer_id: int, failed: Sequence[int]) -> tuple[Request, bool] | None:
        if transfer_id not in self._blocks:
            return None  # the transfer was abandoned
        is_load = transfer_id in self._loads
        entry = self._settle_load(transfer_id, failed) if is_load else None
        num_good = len(self._end(transfer_id)) - len(failed)
        if is_load:
            self.num_loaded_blocks += num_good
        else:
            self.num_stored_blocks += num_good
        return entry

    def _settle_load(self, transfer_id: int, failed: Sequence[int]) -> tuple[Request, bool] | None:
        """Record the end of a load. Return (request, success) if they must be reported."""
        self.num_failed_loads += bool(failed)
        request = self._loads[transfer_id]
        if request is None or request.status.finished:
            return None
        if self._load_of.get(request.request_id) == transfer_id:
            del self._load_of[request.request_id]
            is_well = self._kv_cache.loaded(request, failed)
        elif failed:  # the request used the blocks and was then preempted
            is_well = False
        else:
            return None
        if not is_well:
            self._let_down.add(request.request_id)
        return request, is_well

    def _begin(self, request: Request, blocks: Sequence[int], keys: Sequence[bytes]) -> KVTransfer:
        self._next_id += 1
        self._kv_cache.pin(blocks)
        self._blocks[self._next_id] = blocks
        self._begun_ns[self._next_id] = self._clock.now_ns()
        return KVTransfer(
            transfer_id=self._next_id,
            request_id=request.request_id,
            keys=tuple(keys),
            block_ids=tuple(blocks),
        )

    def _end(self, transfer_id: int) -> Sequence[int]:
        blocks = self._blocks.pop(transfer_id)
        for begun_ns in (self._begun_ns, self._late_ns):
            begun_ns.pop(transfer_id, None)
        self._loads.pop(transfer_id, None)
        self._kv_cache.unpin(blocks)
        return blocks


def _first_before(begun_ns: Mapping[int, int], limit_ns: int) -> int | None:
    """Return the first transfer if it was started at `limit_ns` or before."""
    for transfer_id, start_ns in begun_ns.items():
        return transfer_id if start_ns <= limit_ns else None
    return None
