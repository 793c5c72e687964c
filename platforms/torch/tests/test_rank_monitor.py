"""Monitoring of other ranks: if a process exits, collective operations are aborted."""

import os
import subprocess
import sys
import threading
from array import array
from datetime import timedelta

import pytest
from torch import distributed

from dovetail.errors import PeerLostError
from dovetail.result import ModelRunnerOutput
from dovetail_torch.accelerator.worker import AcceleratorWorker
from dovetail_torch.distributed.checked_output import check_peers
from dovetail_torch.distributed.nccl_ranks import join_nccl
from dovetail_torch.distributed.process_ranks import ProcessRanks
from dovetail_torch.distributed.rank_monitor import RankMonitor, monitor_ranks
from dovetail_torch.worker import TorchWorker

OUTPUT = ModelRunnerOutput(step_id=1, num_sampled=array("B"), token_ids=array("i"))
LIMIT_S = 20


@pytest.fixture
def peer():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()
    process.stdin.close()


class Group:
    """A process group whose collective operations end when it is aborted."""

    def __init__(self):
        self.aborted, self.num_calls = threading.Event(), 0

    def abort(self):
        self.num_calls += 1
        self.aborted.set()


class Step:
    """A step that the device finishes when the group is aborted, or never."""

    def __init__(self, group, *, ends=True):
        self._group, self._ends = group, ends

    def done(self):
        return self._ends and self._group.aborted.is_set()

    def result(self, timeout=None):
        assert self._group.aborted.wait(LIMIT_S)
        return OUTPUT


@pytest.mark.parametrize("ends", [True, False])
def test_a_process_that_exits_aborts_the_collective_operation_and_its_result_is_an_error(
    peer, ends
):
    group = Group()
    monitor = RankMonitor({1: peer.pid}, group.abort)
    step = check_peers(Step(group, ends=ends), monitor)
    assert not step.done()
    monitor.check()
    peer.kill()
    assert group.aborted.wait(LIMIT_S)
    assert step.done()
    with pytest.raises(PeerLostError, match="rank 1 has exited, so the collective operation was"):
        step.result()
    with pytest.raises(PeerLostError):
        check_peers(OUTPUT, monitor)
    monitor.close()
    assert group.num_calls == 1


def test_a_process_that_exited_before_the_monitor_starts_is_reported_as_lost(peer):
    peer.kill()
    peer.wait()
    group = Group()
    monitor = RankMonitor({2: peer.pid}, group.abort)
    assert group.aborted.wait(LIMIT_S)
    with pytest.raises(PeerLostError, match="rank 2 has exited"):
        monitor.check()


def test_a_closed_monitor_does_not_abort_collective_operations(peer):
    group = Group()
    monitor = RankMonitor({1: peer.pid}, group.abort)
    assert check_peers(OUTPUT, monitor) is OUTPUT
    with pytest.raises(TimeoutError):
        check_peers(Step(group), monitor).result(timeout=0.01)
    before = len(os.listdir("/proc/self/fd"))
    monitor.close()
    monitor.close()
    assert len(os.listdir("/proc/self/fd")) == before - 3
    peer.kill()
    assert not group.aborted.wait(0.05)
    monitor.check()


def test_a_monitor_whose_thread_has_closed_its_socket_can_be_closed(peer):
    """A pipe without a reader cannot be written."""
    monitor = RankMonitor({1: peer.pid}, Group().abort)
    peer.kill()
    monitor._thread.join(LIMIT_S)
    monitor.close()


def test_ranks_of_this_process_and_of_other_machines_are_not_monitored():
    store = distributed.HashStore()
    store.set("process of rank 1", "another-machine pid:[1] 1")
    monitor = monitor_ranks(store, rank=0, size=2, abort=Group().abort)
    assert monitor.num_monitored == 0
    monitor.close()


def test_ranks_with_a_device_group_are_monitored(peer, monkeypatch):
    """`join_nccl` with a substitute for torch's process group, which needs a device."""
    created = []

    class RecordedGroup(Group):
        class Options:
            _timeout = None

        def __init__(self, store, rank, size, options):
            super().__init__()
            created.append((self, options._timeout))

    monkeypatch.setattr(distributed, "ProcessGroupNCCL", RecordedGroup, raising=False)
    monkeypatch.setattr(distributed, "is_nccl_available", lambda: True)
    store, patience = distributed.HashStore(), timedelta(seconds=7)
    identity = f"import os; print(os.readlink('/proc/self/ns/pid'), {peer.pid})"
    namespace = subprocess.check_output([sys.executable, "-c", identity], text=True).strip()
    with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
        boot_id = file.read().strip()
    store.set("peers/process of rank 1", f"{boot_id} {namespace}")
    ranks = join_nccl(store, rank=0, size=2, timeout=patience)
    ((group, timeout),) = created
    assert timeout == patience and ranks.monitor.num_monitored == 1
    peer.kill()
    assert group.aborted.wait(LIMIT_S)


def test_a_worker_raises_after_a_peer_exits_and_stops_its_rank_monitor(peer, monkeypatch):
    group = Group()
    monitor = RankMonitor({1: peer.pid}, group.abort)
    monkeypatch.setattr(TorchWorker, "sample_tokens", lambda self, grammar: OUTPUT)
    worker = AcceleratorWorker.__new__(AcceleratorWorker)
    worker._ranks = ProcessRanks(None, rank=0, size=2, monitor=monitor)
    assert worker.sample_tokens() is OUTPUT
    peer.kill()
    assert group.aborted.wait(LIMIT_S)
    with pytest.raises(PeerLostError):
        worker.sample_tokens()
    worker.shutdown()
    assert not monitor._thread.is_alive()


def test_a_torch_build_without_nccl_is_rejected():
    if distributed.is_nccl_available():
        pytest.skip("this torch has it")
    store = distributed.HashStore()
    with pytest.raises(RuntimeError, match="built without NCCL"):
        join_nccl(store, rank=0, size=2, timeout=timedelta(seconds=1))
