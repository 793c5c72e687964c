"""Tests of replays: every policy creates the same plans again, and a change is detected."""

import pytest

from dovetail.clock import ManualClock
from dovetail.decision_log import DecisionRecorder, LogReader, RecordedScheduler, RecordKind
from dovetail.errors import PluginError, UserError
from dovetail.kv_cache.block_pool import BlockPool
from dovetail.plugins import PluginRegistry
from dovetail.plugins.selection import choose_scheduler
from dovetail.scheduling import Scheduler
from dovetail_devkit.scheduler.playing import play
from dovetail_devkit.scheduler.program import SchedulerDriver
from dovetail_devkit.scheduler.random_programs import random_program
from dovetail_lab.replay import ReplayClock, replay_log
from dovetail_lab.summary import LogObserver, summarize

SEEDS = range(12)
CORE = "dovetail.scheduling.scheduler:Scheduler"
NAMES = sorted({found.name for found in PluginRegistry().candidates("policy")})
NAMES += ["dovetail_devkit.fakes.policy:AgingPolicy"]


def recorded(path, name):
    """Return a function that creates recorded schedulers, to use as a scheduler class, and the
    policy."""
    scheduler_cls, policy_cls = choose_scheduler(PluginRegistry(), name)

    class RecordingSchedulerFactory:
        provides = frozenset({"encoder"})

        def __new__(cls, context):
            recorder = DecisionRecorder(path, scheduler_cls, context)
            return RecordedScheduler(scheduler_cls(recorder.context), recorder)

    return RecordingSchedulerFactory, policy_cls


def record(path, name, seed):
    """Record random calls of a scheduler or policy; return the `SchedulerDriver`."""
    created, policy_cls = recorded(path, name)
    program = random_program(seed)
    driver = SchedulerDriver(created, program, policy=policy_cls)
    play(program, driver)
    return driver


def replay(path, **given):
    return replay_log(LogReader(path), clock=ManualClock(), **given)


@pytest.mark.costly
@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", NAMES)
def test_a_replay_creates_the_recorded_plans(name, tmp_path):
    done = dict.fromkeys(("preemptions", "hits", "aborts", "drafts", "deep", "paused"), 0)
    for seed in SEEDS:
        path = tmp_path / f"{seed}.log"
        driver = record(path, name, seed)
        result = replay(path)
        assert result.difference is None and not result.truncated
        assert result.num_steps == len(driver.plans) > 20
        summary = summarize(LogReader(path), LogObserver())
        assert summary.num_steps == result.num_steps
        assert summary.num_requests == result.num_requests
        assert summary.num_tokens == sum(plan.total_num_tokens for plan in driver.plans)
        done["preemptions"] += summary.num_preemptions
        done["hits"] += summary.num_cached_tokens
        done["aborts"] += summary.num_aborted
        done["drafts"] += driver.drafts.num_verified
        done["deep"] += driver.program.depth == 2
        done["paused"] += RecordKind.PAUSE in [item.kind for item in LogReader(path)]
    preempts = name not in ("orca", "static")
    assert all(count for what, count in done.items() if what != "preemptions" or preempts), done


def test_a_replay_uses_the_scheduler_and_the_times_in_the_log(tmp_path):
    path = tmp_path / "one.log"
    driver = record(path, CORE, 3)
    result = replay(path)
    assert result.scheduler == CORE
    # `SchedulerDriver` advances its clock by 1 ms per step, before every reading except the first.
    assert result.covered_ns > 0 and not result.covered_ns % 1_000_000
    assert result.covered_ns <= len(driver.plans) * 1_000_000


def newest_first(pool, count):
    return allocate(pool, count)[::-1]


allocate = BlockPool.allocate


def test_a_replay_detects_a_changed_decision_of_the_scheduler(tmp_path, monkeypatch):
    path = tmp_path / "one.log"
    record(path, CORE, 0)
    monkeypatch.setattr(BlockPool, "allocate", newest_first)
    difference = replay(path).difference
    assert set(difference.fields) == {"blocks"}
    recorded_blocks, mine = difference.fields["blocks"]
    assert recorded_blocks != mine


@pytest.mark.costly
def test_a_replay_names_the_step_at_which_another_scheduler_differs(tmp_path):
    first = set()
    for seed in SEEDS:
        path = tmp_path / f"{seed}.log"
        record(path, CORE, seed)
        assert replay(path, scheduler=CORE).difference is None
        result = replay(path, scheduler="priority")
        if result.difference is not None:
            assert result.difference.step == result.num_steps
            first |= set(result.difference.fields)
    assert "joins" in first


def test_the_complete_records_of_a_truncated_log_are_replayed(tmp_path):
    path = tmp_path / "one.log"
    record(path, "sjf", 2)
    whole = replay(path).num_steps
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    result = replay(path)
    assert result.truncated and result.difference is None and 0 < result.num_steps < whole


def test_a_log_without_a_header_is_rejected(tmp_path):
    path = tmp_path / "one.log"
    path.write_bytes(b"dovetail decisions 1\n")
    for reading in (replay, lambda path: summarize(LogReader(path), LogObserver())):
        with pytest.raises(UserError, match="no header"):
            reading(path)


def test_the_error_for_a_recorded_scheduler_that_no_longer_exists_names_it(tmp_path, monkeypatch):
    path = tmp_path / "one.log"
    with monkeypatch.context() as changed:
        changed.setattr(Scheduler, "__module__", "uninstalled_package")
        record(path, "edf", 1)
    with pytest.raises(PluginError, match="uninstalled_package"):
        replay(path)
    assert replay(path, scheduler="edf").difference is None


def test_the_replay_clock_skips_recorded_times_that_are_not_read():
    clock = ReplayClock()
    clock.feed([5, 6])
    assert [clock.now_ns(), clock.covered_ns] == [5, 0]
    clock.feed([9])
    assert [clock.now_ns(), clock.now_ns(), clock.covered_ns] == [9, 9, 4]
