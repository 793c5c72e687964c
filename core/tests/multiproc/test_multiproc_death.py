"""Workers that fail, exit, hang or are stopped, and parents that exit."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dovetail.errors import (
    CapacityError,
    EngineDeadError,
    ModelError,
    PeerLostError,
    StalledError,
    StartError,
)
from dovetail_devkit.contexts import write_fake_config
from dovetail_devkit.executor.plans import make_plans
from dovetail_devkit.executor.workers import UnloadableWorker
from dovetail_devkit.harnesses.process_tree import is_running
from dovetail_devkit.suites.executor import start

HERE = Path(__file__).parent
PATIENCE_S = 20.0
NOTICE_S = 2.0


def launch(executor, plan):
    executor.execute_model(plan)
    return executor.sample_tokens()


def has_failed(executor):
    try:
        executor.check_health()
    except EngineDeadError:
        return True
    return False


def wait_until(actual, timeout_s):
    end = time.monotonic() + timeout_s
    while not actual() and time.monotonic() < end:
        time.sleep(0.01)
    return actual()


@pytest.mark.costly
@pytest.mark.sampled(4)
@pytest.mark.parametrize("victim", [0, 1])
def test_every_waiting_call_raises_an_error_that_names_the_killed_worker(make, victim):
    executor = make(2, config={"async_scheduling": True}, step=["hangs", "hangs"])
    start(executor)
    pids = executor.collective_rpc("pid")
    first, second, *_ = make_plans()
    handles = [launch(executor, first), launch(executor, second)]
    handles.append(executor.collective_rpc("pid", non_block=True))
    handles[0].result(PATIENCE_S)
    began = time.monotonic()
    os.kill(pids[victim], signal.SIGKILL)
    message = f"worker {victim} .process {pids[victim]}. ended by SIGKILL"
    for handle in handles[1:]:
        with pytest.raises(EngineDeadError, match=message):
            handle.result(PATIENCE_S)
    with pytest.raises(EngineDeadError, match=message):
        executor.check_health()
    with pytest.raises(EngineDeadError, match=message):
        launch(executor, second)
    assert time.monotonic() - began < NOTICE_S
    assert handles[0].done() and handles[0].result(0).step_id == 0
    assert wait_until(lambda: not any(map(is_running, pids)), NOTICE_S)


@pytest.mark.costly
@pytest.mark.sampled(4)
@pytest.mark.parametrize("rank", [0, 1])
def test_the_error_of_a_failed_step_is_raised_even_if_the_other_worker_hangs(make, rank):
    ways = ["hangs", "hangs"]  # as if the worker waited for its peer
    ways[rank] = "rejects"
    executor = make(2, step=ways)
    start(executor)
    first, second, *_ = make_plans()
    launch(executor, first).result(PATIENCE_S)
    with pytest.raises(CapacityError, match=rf"worker {rank} .*: 7 GB are needed"):
        launch(executor, second).result(PATIENCE_S)
    with pytest.raises(EngineDeadError, match="7 GB are needed"):
        executor.check_health()


@pytest.mark.costly
def test_a_step_error_raised_before_the_tokens_are_requested_is_reported(make):
    executor = make(2, step=["rejects", "hangs"])
    start(executor)
    first, second, third, *_ = make_plans()
    launch(executor, first).result(PATIENCE_S)
    with pytest.raises(CapacityError, match=r"worker 0 .*: 7 GB are needed"):
        executor.execute_model(second)  # the call also raises if the worker has closed its ring
        assert wait_until(lambda: has_failed(executor), PATIENCE_S)
        executor.sample_tokens()
    with pytest.raises(EngineDeadError, match="7 GB are needed"):
        executor.execute_model(third)


@pytest.mark.costly
def test_a_worker_that_exited_is_reported_as_the_cause_even_if_another_worker_fails_first(make):
    executor = make(2, step=["loses a peer", "exits late"])
    start(executor)
    first, second, *_ = make_plans()
    launch(executor, first).result(PATIENCE_S)
    with pytest.raises(EngineDeadError, match=r"worker 1 .* ended with status 3"):
        launch(executor, second).result(PATIENCE_S)


@pytest.mark.costly
def test_a_lost_connection_to_a_running_worker_is_reported(make):
    executor = make(2, step=["loses a peer", "hangs"])
    start(executor)
    first, second, *_ = make_plans()
    launch(executor, first).result(PATIENCE_S)
    with pytest.raises(PeerLostError, match=r"worker 0 .* the others cannot be reached"):
        launch(executor, second).result(PATIENCE_S)


@pytest.mark.costly
def test_the_exit_status_of_a_process_is_reported(make):
    executor = make(step=["exits"])
    start(executor)
    first, second, *_ = make_plans()
    launch(executor, first).result(PATIENCE_S)
    with pytest.raises(EngineDeadError, match=r"worker 0 .* ended with status 3"):
        executor.execute_model(second).result(PATIENCE_S)


@pytest.mark.costly
def test_a_step_that_exceeds_its_deadline_stops_the_engine(make):
    executor = make(2, limits={"step_timeout_s": 0.3}, step=["hangs", ""])
    start(executor)
    pids = executor.collective_rpc("pid")
    first, second, *_ = make_plans()
    launch(executor, first).result()
    handle = launch(executor, second)
    with pytest.raises(TimeoutError):
        handle.result(0.05)
    with pytest.raises(EngineDeadError, match=r"worker 0 has not completed a step within"):
        handle.result()
    assert wait_until(lambda: not any(map(is_running, pids)), NOTICE_S)


@pytest.mark.costly
@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("raises", StartError, "worker 1 .* in load_model: .*RuntimeError: the chip melted"),
        ("rejects", CapacityError, "worker 1 .* in load_model: 7 GB are needed"),
        ("exits", EngineDeadError, "worker 1 .* ended in load_model with status 3"),
        ("hangs", StartError, "worker 1 .* in load_model: .* within 1.8 s: .*multiproc_parts"),
    ],
)
def test_a_failed_start_names_the_worker_and_the_phase(make, how, error, message):
    with pytest.raises(error, match=message):
        make(2, config={"start_timeout_s": 2}, start=["", how])


@pytest.mark.costly
def test_an_error_while_the_model_is_loaded_keeps_its_class(make):
    with pytest.raises(ModelError, match=r"worker 0 .* in load_model: requested failure"):
        make(worker_cls=UnloadableWorker)


@pytest.mark.costly
def test_a_stopped_worker_is_reported_and_can_recover(make):
    executor = make(2, limits={"stall_s": 0.8})
    pid = executor.collective_rpc("pid")[1]
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()

    def is_stalled():
        try:
            executor.check_health()
        except StalledError as error:
            return "sent no heartbeat for" in str(error)
        return False

    assert wait_until(is_stalled, 5) and time.monotonic() - began < 2
    assert executor.silence_s() >= 0.8
    os.kill(pid, signal.SIGCONT)
    assert wait_until(lambda: not is_stalled(), 2)
    assert executor.collective_rpc("pid", timeout=PATIENCE_S)[1] == pid


@pytest.mark.costly
def test_a_busy_worker_is_not_reported_as_stalled(make):
    executor = make(2, limits={"stall_s": 1.0})
    busy = executor.collective_rpc("burn", args=(1.4,), non_block=True)
    while not busy.done():
        executor.check_health()
        time.sleep(0.02)
    assert busy.result(0) == [None, None]


@pytest.mark.costly
def test_a_stopped_worker_does_not_delay_the_shutdown(make):
    executor = make(limits={"stop_timeout_s": 0.3})
    pid = executor.collective_rpc("pid")[0]
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    executor.shutdown()
    assert time.monotonic() - began < NOTICE_S and not is_running(pid)


@pytest.mark.costly
def test_the_child_processes_of_a_worker_exit_with_the_worker(make):
    executor = make()
    child = executor.collective_rpc("has_child")[0]
    assert is_running(child)
    executor.shutdown()
    assert wait_until(lambda: not is_running(child), NOTICE_S)


@pytest.mark.costly
def test_workers_exit_when_their_executor_is_garbage_collected(make, parts, tmp_path):
    import weakref

    from dovetail.executors.multiproc.executor import MultiprocExecutor
    from dovetail_devkit.contexts import make_executor_context

    executor = MultiprocExecutor(make_executor_context(tmp_path, parts.FaultyWorker))
    pid, executor_ref = executor.collective_rpc("pid")[0], weakref.ref(executor)
    del executor
    assert executor_ref() is None and not is_running(pid)


@pytest.mark.costly
@pytest.mark.sampled(4)
@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_workers_exit_when_their_parent_is_killed(tmp_path, stopped):
    write_fake_config(tmp_path)
    parent = subprocess.Popen(
        [sys.executable, str(HERE / "multiproc_parent.py"), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
    )
    with parent:
        *pids, folder = parent.stdout.readline().split()
        assert len(pids) == 4 and all(is_running(int(pid)) for pid in pids)
        assert Path(folder).stat().st_mode & 0o777 == 0o700
        for pid in pids[: 2 * stopped]:
            os.kill(int(pid), signal.SIGSTOP)
        parent.kill()
    assert wait_until(lambda: not any(is_running(int(pid)) for pid in pids), 5)
    assert wait_until(lambda: not Path(folder).exists(), 5)


@pytest.mark.costly
@pytest.mark.sampled(4)
@pytest.mark.parametrize("what", ["os.pidfd_open", "subprocess.Popen"])
def test_the_first_worker_is_stopped_if_the_second_cannot_start(make, monkeypatch, what):
    module, name = {"os": os, "subprocess": subprocess}[what.partition(".")[0]], what.split(".")[1]
    real, calls = getattr(module, name), []

    def limited(*args, **kwargs):
        calls.append(args)
        if len(calls) > 1:
            raise OSError(24, "Too many open files")
        return real(*args, **kwargs)

    monkeypatch.setattr(module, name, limited)
    with pytest.raises(OSError, match="Too many open files"):
        make(2)
    assert len(calls) == 2


@pytest.mark.soak
def test_a_worker_killed_at_a_random_moment_is_reported_in_each_of_40_runs(make):
    rng = random.Random(20261121)
    for _ in range(40):
        executor = make(2, config={"async_scheduling": True})
        start(executor)
        pids = executor.collective_rpc("pid")
        victim, began = rng.randrange(2), []
        executor.collective_rpc("burn", args=(0.05,), non_block=True)

        def kill(pid, began=began):
            began.append(time.monotonic())
            os.kill(pid, signal.SIGKILL)

        timer = threading.Timer(rng.random() / 10, kill, args=(pids[victim],))
        timer.start()
        with pytest.raises(EngineDeadError, match=rf"worker {victim} .* ended by SIGKILL"):
            while True:
                executor.collective_rpc("echo", args=(1,))
        assert time.monotonic() - began[0] < NOTICE_S
        timer.join()
        executor.shutdown()
        assert not any(map(is_running, pids))
