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
from dovetail_torch.distributed.small_sums import MAX_BYTES, RanksWithSmallSums, use_small_sums

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
def test_only_small_tensors_of_floats_use_small_sums(name):
    x, is_small = TENSORS[name]

    def work(ranks):
        sums = OverGloo(ranks)
        fast = use_small_sums(ranks, sums, "", HOST)
        scaled = x * (ranks.rank + 1)
        return fast.all_reduce(scaled), sums.num_calls

    for total, num_calls in on_two_ranks(work):
        assert torch.equal(total, x * 3) and num_calls == is_small


def test_all_ranks_use_the_process_group_if_one_rank_cannot_use_small_sums(caplog):
    def work(ranks):
        sums = OverGloo(ranks) if ranks.rank else None
        used = use_small_sums(ranks, sums, "" if ranks.rank else "no peer access", HOST)
        return type(used), used.all_reduce(torch.ones(4)).tolist()

    caplog.set_level(logging.WARNING)
    assert on_two_ranks(work) == [(ProcessRanks, [2.0] * 4)] * 2
    assert "custom_all_reduce=True is ignored" in caplog.text
    assert "no peer access" in caplog.text and "another rank cannot use it" in caplog.text


def test_an_error_in_a_small_sum_is_reported_as_a_lost_rank():
    class Broken:
        def all_reduce(self, x):
            raise RuntimeError("the signal timed out")

    def work(ranks):
        fast = RanksWithSmallSums(ranks, Broken())
        with pytest.raises(PeerLostError, match="the signal timed out"):
            fast.all_reduce(torch.ones(4))

    on_two_ranks(work)


@pytest.mark.parametrize("has_sums", [True, False])
def test_a_worker_uses_the_small_sums_of_its_runtime(has_sums, caplog):
    def work(ranks):
        class Runtime(AcceleratorRuntime):
            def small_sums(self, device):
                return OverGloo(ranks) if has_sums else super().small_sums(device)

        worker = AcceleratorWorker.__new__(AcceleratorWorker)
        worker._runtime, worker._ranks, worker._device = Runtime("cpu"), ranks, HOST
        return type(worker._with_small_sums())

    expected = RanksWithSmallSums if has_sums else ProcessRanks
    assert on_two_ranks(work) == [expected] * 2
    assert ("the platform of 'cpu' does not provide it" in caplog.text) != has_sums


def test_a_platform_without_small_sums_states_the_reason():
    with pytest.raises(RuntimeError, match="the platform of 'cpu' does not provide it"):
        AcceleratorRuntime("cpu").small_sums(HOST)
