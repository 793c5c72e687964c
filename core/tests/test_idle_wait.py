"""The wait time of an engine between steps while no request can run."""

from dataclasses import replace

import pytest

from dovetail.clock import ManualClock
from dovetail.engine.core import EngineCore
from dovetail.engine.idle_wait import IdleWait
from dovetail.interfaces import Hold, Policy, SchedulerContext, SchedulerLimits
from dovetail.scheduling import Scheduler
from dovetail_devkit.executor.null_executor import NullExecutor
from dovetail_devkit.scheduler.gate import FakeGate
from dovetail_devkit.scheduler.random_programs import make_kv_cache
from dovetail_devkit.suites.scheduler import make_request

LIMITS = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64)


class HoldsAll(Policy):
    work_conserving = False

    def plan(self, view):
        for request in view.running:
            yield Hold(request)


def test_idle_waits_grow_from_1_to_10_milliseconds_and_are_reset_when_a_request_runs():
    clock = ManualClock()
    idle = IdleWait(clock)
    waits = []
    for _ in range(8):
        idle.extend()
        waits.append(round(1000 * idle.remaining_s))
        clock.advance(int(1e9 * idle.remaining_s))
        assert idle.remaining_s == 0.0
    assert waits == [0, 0, 1, 2, 4, 8, 10, 10]
    idle.extend()
    idle.end()
    assert idle.remaining_s == 0.0
    idle.extend()
    assert idle.remaining_s == 0.0  # again, the first two steps without a run do not wait


@pytest.fixture(params=["step", "step_with_batch_queue"])
def make_core(request):
    def make(policy=None, gates=()):
        context = SchedulerContext(
            limits=LIMITS,
            kv_cache=make_kv_cache(num_blocks=65, block_size=4),
            clock=ManualClock(),
            policy=policy,
        )
        scheduler = Scheduler(replace(context, gates=gates))
        core = EngineCore(NullExecutor(), scheduler, vocab_size=100, max_model_len=64)
        return core, getattr(core, request.param)

    return make


@pytest.mark.parametrize("what", ["gate", "policy"])
def test_an_engine_core_without_runnable_requests_reports_a_wait_time(make_core, what):
    gate = FakeGate(lambda request: request.request_id == "held")
    core, step = make_core(HoldsAll) if what == "policy" else make_core(gates=[gate])
    core.add_request(make_request("held"))
    for _ in range(8):
        assert core.has_work()
        step()
    assert 0 < core.wait_s <= 0.01
    core.add_request(make_request("other", max_tokens=9))
    assert core.wait_s == 0
    if what == "policy":
        return
    for _ in range(6):
        step()
        assert core.wait_s == 0
    core.abort_requests(["other"])
    for _ in range(8):
        step()
    assert core.wait_s > 0
    gate.open("held")
    ended = []
    while core.has_work():
        outputs = step()
        ended += outputs.finished if outputs else ()
    assert [item.request_id for item in ended] == ["held"]
