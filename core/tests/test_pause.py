"""A paused engine does not spin, loses no request and continues after resume."""

import pytest

from dovetail import LLM, SamplingParams
from dovetail.clock import ManualClock
from dovetail.engine.core import EngineCore
from dovetail.errors import UserError
from dovetail.interfaces import PauseScope, SchedulerContext, SchedulerLimits
from dovetail.scheduling import Scheduler
from dovetail_devkit import FAKES
from dovetail_devkit.contexts import SMALL_ENGINE, write_fake_config
from dovetail_devkit.executor.null_executor import NullExecutor
from dovetail_devkit.scheduler.random_programs import make_kv_cache
from dovetail_devkit.suites.scheduler import make_request

PARAMS = SamplingParams(max_tokens=5, seed=1, detokenize=False, ignore_eos=True)


@pytest.fixture
def core():
    limits = SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=32)
    kv_cache = make_kv_cache(num_blocks=65, block_size=4)
    scheduler = Scheduler(SchedulerContext(limits=limits, kv_cache=kv_cache, clock=ManualClock()))
    return EngineCore(NullExecutor(), scheduler, vocab_size=100, max_model_len=32)


@pytest.mark.parametrize("step", ["step", "step_with_batch_queue"])
def test_a_paused_engine_core_has_no_work_after_the_results_of_its_plans(core, step):
    step = getattr(core, step)
    core.add_request(make_request("a", max_tokens=9))
    step()
    core.pause(PauseScope.ALL)
    while core.has_work():
        step()
    assert core.paused is PauseScope.ALL
    assert core.scheduler.depth().num_running == 1
    core.add_request(make_request("b"))
    assert not core.has_work()
    assert core.abort_requests(["a"]) == ["a"]
    core.resume()
    assert core.paused is None and core.has_work()
    finished = []
    while core.has_work():
        outputs = step()
        finished += outputs.finished if outputs else ()
    assert [ended.request_id for ended in finished] == ["b"]


def test_running_requests_finish_during_a_pause_of_new_requests(core):
    core.add_request(make_request("old", max_tokens=4))
    core.step()
    core.pause(PauseScope.NEW)
    core.add_request(make_request("new"))
    finished = []
    while core.has_work():
        finished += core.step().finished
    assert [ended.request_id for ended in finished] == ["old"]
    core.resume()
    assert core.has_work()


@pytest.fixture(params=[False, True], ids=["depth 1", "depth 2"])
def llm(request, tmp_path):
    with LLM(
        write_fake_config(tmp_path),
        platform=FAKES["platform"],
        worker_cls=FAKES["worker"],
        scheduler_cls="dovetail.scheduling:Scheduler",
        skip_tokenizer_init=True,
        async_scheduling=request.param,
        **SMALL_ENGINE,
    ) as opened_llm:
        yield opened_llm


def run(engine):
    """Step until there are no more outputs. Return the tokens of finished requests."""
    ended = {}
    for _ in range(40):
        for output in engine.step():
            if output.finished:
                ended[output.request_id] = list(output.outputs[0].token_ids)
    return ended


def test_a_resumed_engine_continues_its_requests(llm):
    engine = llm.llm_engine
    due = [list(item.outputs[0].token_ids) for item in llm.generate([[1, 2], [3]], PARAMS)]
    engine.add_request("a", [1, 2], PARAMS)
    engine.step()
    engine.pause()
    engine.add_request("b", [3], PARAMS)
    assert run(engine) == {} and engine.has_unfinished_requests()
    assert engine.paused is PauseScope.ALL
    engine.resume()
    assert run(engine) == {"a": due[0], "b": due[1]}


def test_aborts_are_reported_during_a_pause(llm):
    engine = llm.llm_engine
    engine.pause("new")
    engine.add_request("a", [1, 2], PARAMS)
    assert run(engine) == {}
    engine.abort_request("a")
    (output,) = engine.step()
    assert output.finished and output.outputs[0].finish_reason == "abort"
    assert not engine.has_unfinished_requests()


def test_generate_raises_while_the_engine_is_paused(llm):
    llm.llm_engine.pause("new")
    with pytest.raises(UserError, match=r"paused \(new\)"):
        llm.generate([[1, 2]], PARAMS)
    llm.llm_engine.resume()
    assert len(llm.generate([[1, 2]], PARAMS)) == 1


def test_an_unknown_pause_scope_is_rejected(llm):
    with pytest.raises(UserError, match="'some' is not a valid pause scope"):
        llm.llm_engine.pause("some")
    assert llm.llm_engine.paused is None
