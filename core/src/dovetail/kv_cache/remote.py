"""The scheduler's dealings with a KV connector: what is loaded, what is stored, what is held.

Between the KV cache manager, whose blocks are moved, and the connector's scheduler side, which
says what can be. Blocks under way are pinned, so that they outlive the request that they were for.
A transfer that does not end in time is given up: first whoever waits for it continues without,
then, when the worker's side may no longer touch them, its blocks come free. Depends on no plan: the
scheduler carries instructions and answers.
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
    """One connector's use by one scheduler.

    num_loaded_blocks, num_stored_blocks, num_failed_loads: sums over its life.
    num_given_up: transfers that had not ended in time, likewise.
    """

    def __init__(
        self, side: KVSchedulerSide, kv_cache: KVCacheManager, *, clock: Clock, timeout_s: float
    ) -> None:
        """timeout_s: after which a load has failed; its blocks come free after twice the time."""
        self.num_loaded_blocks = 0
        self.num_stored_blocks = 0
        self.num_failed_loads = 0
        self.num_given_up = 0
        self._clock = clock
        self._timeout_ns = int(timeout_s * 1e9)
        self._begun_ns: dict[int, int] = {}  # of each transfer in time, the oldest first
        self._late_ns: dict[int, int] = {}  # likewise, of those whose time is up
        self._side = side
        self._kv_cache = kv_cache
        self._next_id = 0
        self._blocks: dict[int, Sequence[int]] = {}  # of each transfer under way; pinned
        self._loads: dict[int, Request | None] = {}  # those for whom a load is, if they still care
        self._load_of: dict[str, int] = {}
        self._num_offered: dict[str, int] = {}
        self._let_down: set[str] = set()

    @property
    def num_transfers(self) -> int:
        """Transfers that have not ended. While there are any, plans must go out, empty ones too."""
        return len(self._blocks)

    def lookup(self, request: Request) -> Hit:
        """Return what `KVCacheManager.lookup` does, with blocks that could be loaded as missing.

        A request whose load has failed finds only what is here.
        """
        if request.request_id in self._let_down:
            return self._kv_cache.lookup(request)
        return self._kv_cache.lookup(request, self._side.has)

    def load(self, request: Request, hit: Hit) -> bool:
        """Have the blocks loaded that are missing from `hit`, with which it has been admitted.

        Returns whether the request must wait for that; else it may run in the next plan. Either
        way, and unless the request is released before, `update` says when its load has ended.
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
        """Offer the blocks for storing that the request has committed since it did so last."""
        start = self._num_offered.get(request.request_id, 0)
        end = request.num_committed_blocks
        if end <= start:
            return
        self._num_offered[request.request_id] = end
        named = self._kv_cache.named_blocks(request, start, end)
        there = self._side.has([key for _, key in named])
        wanted = [pair for pair, is_there in zip(named, there, strict=True) if not is_there]
        if not wanted:
            return
        blocks = [block for block, _ in wanted]
        transfer = self._begin(request, blocks, [key for _, key in wanted])
        if not self._side.store(transfer):
            self._end(transfer.transfer_id)

    def release(self, request: Request, *, finished: bool) -> None:
        """Note that the request is about to give up its blocks; offer what it has first.

        finished: whether it will not come back.
        """
        self.offer(request)
        transfer_id = self._load_of.pop(request.request_id, None)
        if transfer_id is not None and finished:
            self._loads[transfer_id] = None
        if finished:
            self._num_offered.pop(request.request_id, None)
            self._let_down.discard(request.request_id)

    def take_instructions(self) -> bytes:
        """Return what travels with the next plan."""
        return self._side.take_instructions()

    def update(self, answer: bytes) -> list[tuple[Request, bool]]:
        """Take in a worker's answer; return the requests whose loads have ended, and how.

        Those that are well are committed. The others stand on blocks that are not what they should
        be: drop what was sampled for them, free them, and let them wait again. Some may have given
        up their blocks meanwhile; they are only reported if what was sampled is to be dropped.
        """
        outcome = self._side.update(answer)
        ended = {**dict.fromkeys(outcome.done, ()), **outcome.failed}
        settled = [self._settle(transfer_id, failed) for transfer_id, failed in ended.items()]
        return [entry for entry in settled if entry is not None]

    def give_up_late(self) -> list[tuple[Request, bool]]:
        """Give up transfers that have not ended in time; return what `update` would of their loads.

        Nobody waits for them any more. Their blocks stay pinned until twice the time is up, or the
        transfer ends: until then something may still be written to them.
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
                "given up; requests that wait for it compute instead. Later ones are counted.",
                len(self._blocks[transfer_id]),
                self._timeout_ns / 1e9,
            )

    def shutdown(self) -> None:
        """Let go of the connector and of what was pinned for it. May be called twice."""
        self._side.shutdown()
        for transfer_id in list(self._blocks):
            self._end(transfer_id)
        self._loads.clear()
        self._load_of.clear()

    def _settle(self, transfer_id: int, failed: Sequence[int]) -> tuple[Request, bool] | None:
        if transfer_id not in self._blocks:
            return None  # it was given up
        is_load = transfer_id in self._loads
        entry = self._settle_load(transfer_id, failed) if is_load else None
        num_good = len(self._end(transfer_id)) - len(failed)
        if is_load:
            self.num_loaded_blocks += num_good
        else:
            self.num_stored_blocks += num_good
        return entry

    def _settle_load(self, transfer_id: int, failed: Sequence[int]) -> tuple[Request, bool] | None:
        """Note how a load has ended; return whose it is and how, if anybody is to know."""
        self.num_failed_loads += bool(failed)
        request = self._loads[transfer_id]
        if request is None or request.status.finished:
            return None
        if self._load_of.get(request.request_id) == transfer_id:
            del self._load_of[request.request_id]
            is_well = self._kv_cache.loaded(request, failed)
        elif failed:  # it has run on that, and was preempted since
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
    """Return the first transfer if it was begun at `limit_ns` or before."""
    for transfer_id, start_ns in begun_ns.items():
        return transfer_id if start_ns <= limit_ns else None
    return None
