"""All-reduce of small tensors: which tensors use it, and the fallback if a rank cannot."""

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore, ProcessGroupGloo

from dovetail.errors import PeerLostError
from dovetail_torch.accelerator.runtime import AcceleratorRuntime
from dovetail_torch.accelerator.worker import AcceleratorWorker
from dovetail_torch.distributed.process_ranks import ProcessRanks
from dovetail_torch.distributed.small_all_reduce import (
    MAX_BYTES,
    RanksWithSmallAllReduce,
    use_small_all_reduce,
)

HOST = torch.device("cpu")


class OverGloo:
    """An all-reduce for small tensors that uses a process group, and counts its calls."""

    def __init__(self, ranks):
        self.ranks, self.num_calls = ranks, 0

    def all_reduce(self, x):
        assert x.is_contiguous()
        self.num_calls += 1
        return self.ranks.all_reduce(x.clone())


def on_two_ranks(work):
    """Run `work(ranks)` on two ranks in threads, and return the results."""
    store = HashStore()

    def run(rank):
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        return work(ProcessRanks(ProcessGroupGloo(store, rank, 2, options), rank=rank, size=2))

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))


TENSORS = {
    "a small tensor": (torch.ones(4, 8), True),
    "bfloat16": (torch.ones(16, dtype=torch.bfloat16), True),
    "not contiguous": (torch.ones(4, 8).T, True),
    "the largest": (torch.ones(MAX_BYTES // 4), True),
    "too large": (torch.ones(MAX_BYTES // 4 + 4), False),
    "a size that is not a multiple": (torch.ones(3), False),
    "int64": (torch.ones(4, dtype=torch.int64), False),
    "no elements": (torch.ones(0, 4), False),
}


@pytest.mark.parametrize("name", TENSORS)
def test_only_small_tensors_of_floats_use_the_small_all_reduce(name):
    x, is_small = TENSORS[name]

    def work(ranks):
        fast = OverGloo(ranks)
        used = use_small_all_reduce(ranks, fast, "", HOST)
        scaled = x * (ranks.rank + 1)
        return used.all_reduce(scaled), fast.num_calls

    for total, num_calls in on_two_ranks(work):
        assert torch.equal(total, x * 3) and num_calls == is_small


def test_if_one_rank_cannot_use_the_small_all_reduce_all_ranks_use_the_process_group(caplog):
    def work(ranks):
        fast = OverGloo(ranks) if ranks.rank else None
        used = use_small_all_reduce(ranks, fast, "" if ranks.rank else "no peer access", HOST)
        return type(used), used.all_reduce(torch.ones(4)).tolist()

    caplog.set_level(logging.WARNING)
    assert on_two_ranks(work) == [(ProcessRanks, [2.0] * 4)] * 2
    assert "custom_all_reduce=True is ignored" in caplog.text
    assert "no peer access" in caplog.text and "another rank cannot use it" in caplog.text


def test_an_error_in_the_small_all_reduce_is_reported_as_a_lost_rank():
    class Broken:
        def all_reduce(self, x):
            raise RuntimeError("the signal timed out")

    def work(ranks):
        fast = RanksWithSmallAllReduce(ranks, Broken())
        with pytest.raises(PeerLostError, match="the signal timed out"):
            fast.all_reduce(torch.ones(4))

    on_two_ranks(work)


@pytest.mark.parametrize("is_supported", [True, False])
def test_a_worker_uses_the_small_all_reduce_of_its_runtime(is_supported, caplog):
    def work(ranks):
        class Runtime(AcceleratorRuntime):
            def small_all_reduce(self, device):
                return OverGloo(ranks) if is_supported else super().small_all_reduce(device)

        worker = AcceleratorWorker.__new__(AcceleratorWorker)
        worker._runtime, worker._ranks, worker._device = Runtime("cpu"), ranks, HOST
        return type(worker._with_small_all_reduce())

    expected = RanksWithSmallAllReduce if is_supported else ProcessRanks
    assert on_two_ranks(work) == [expected] * 2
    assert ("the platform of 'cpu' does not provide it" in caplog.text) != is_supported


def test_a_platform_without_a_small_all_reduce_states_the_reason():
    with pytest.raises(RuntimeError, match="the platform of 'cpu' does not provide it"):
        AcceleratorRuntime("cpu").small_all_reduce(HOST)
