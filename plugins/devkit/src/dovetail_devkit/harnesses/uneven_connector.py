"""A KV connector that is slower on one rank, for tests of engines with worker processes."""

from dovetail_kv_memory.connector import MemoryConnector, MemoryWorkerSide, _options, _store_name
from dovetail_kv_memory.store import shared_store

LATE_STEPS = 2


class UnevenWorkerSide(MemoryWorkerSide):
    """Fails every second load, and reports asynchronous transfers some steps late."""

    num_loads = 0

    def __init__(self, store, options):
        super().__init__(store, options)
        self._is_late = options.asynchronous
        self._held = []

    def _load(self, transfer):
        missing = super()._load(transfer)
        self.num_loads += 1
        if self.num_loads % 2:
            return missing
        for cache_NP in self._pages_NP:
            cache_NP[list(transfer["blocks"])] = 255  # NaN in every floating-point type
        return list(transfer["blocks"])

    def finish(self):
        report = super().finish()
        if not self._is_late:
            return report
        self._held.append(report)
        return self._held.pop(0) if len(self._held) > LATE_STEPS else b""


class UnevenConnector(MemoryConnector):
    """Stores blocks in memory. Rank 1 reports transfers late and fails loads."""

    @staticmethod
    def create_worker_side(context):
        if context.rank == 0:
            return MemoryConnector.create_worker_side(context)
        store = shared_store(_store_name(context), _options(context).capacity_bytes)
        return UnevenWorkerSide(store, _options(context))
