"""The scheduler's dealings with a KV connector: what is loaded, what is stored, what is held.

Between the KV cache manager, whose blocks are moved, and the connector's scheduler side, which
says what can be. Blocks under way are pinned, so that they outlive the request that they were for.
Knows no plan: the scheduler carries instructions and answers.
"""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.interfaces.kv_connector import KVSchedulerSide, KVTransfer
from dovetail.kv_cache.hit import Hit
from dovetail.kv_cache.manager import KVCacheManager
from dovetail.request import Request


class RemoteCache:
    """One connector's use by one scheduler.

    num_loaded_blocks, num_stored_blocks, num_failed_loads: sums over its life.
    """

    def __init__(self, side: KVSchedulerSide, kv_cache: KVCacheManager) -> None:
        self.num_loaded_blocks = 0
        self.num_stored_blocks = 0
        self.num_failed_loads = 0
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
        keys = dict(self._kv_cache.named_blocks(request, 0, len(hit.blocks[0])))
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
        up their blocks meanwhile; they are only told of if what was sampled is to be dropped.
        """
        outcome = self._side.update(answer)
        ended = {**dict.fromkeys(outcome.done, ()), **outcome.failed}
        settled = [self._settle(transfer_id, failed) for transfer_id, failed in ended.items()]
        return [entry for entry in settled if entry is not None]

    def shutdown(self) -> None:
        """Let go of the connector and of what was pinned for it. May be called twice."""
        self._side.shutdown()
        for transfer_id in list(self._blocks):
            self._end(transfer_id)
        self._loads.clear()
        self._load_of.clear()

    def _settle(self, transfer_id: int, failed: Sequence[int]) -> tuple[Request, bool] | None:
        num_good = len(self._end(transfer_id)) - len(failed)
        if transfer_id not in self._loads:
            self.num_stored_blocks += num_good
            return None
        self.num_loaded_blocks += num_good
        self.num_failed_loads += bool(failed)
        request = self._loads.pop(transfer_id)
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
        return KVTransfer(
            transfer_id=self._next_id,
            request_id=request.request_id,
            keys=tuple(keys),
            block_ids=tuple(blocks),
        )

    def _end(self, transfer_id: int) -> Sequence[int]:
        blocks = self._blocks.pop(transfer_id)
        self._kv_cache.unpin(blocks)
        return blocks
