import dataclasses

import pytest

from dovetail.engine.core import EngineCore
from dovetail.errors import EngineDeadError, RequestError
from dovetail.interfaces import PauseScope, Ready
from dovetail.request import EngineCoreRequest
from dovetail.sampling_params import SamplingParams

VOCAB = 200
SECRET = 77


class Late:
    """A handle that runs its work when the result is requested."""

    def __init__(self, work):
        self.result = lambda timeout=None: work()

    def done(self):
        return False


class Executor:
    """An executor with the strict worker. breaks, where: the step and the method that fail."""

    def __init__(self, worker, depth, breaks=None, where="sample"):
        self.worker, self.max_concurrent_steps = worker, depth
        self.breaks, self.where = breaks, where
        self.plans, self.results, self.num_shutdowns = [], [], 0

    def execute_model(self, plan):
        self.plans.append(plan)
        if (self.breaks, self.where) == (plan.step_id, "execute"):
            raise RuntimeError("the chip melted")
        return Ready(None)

    def sample_tokens(self, grammar=None):
        plan = self.plans[-1]
        if self.max_concurrent_steps == 1:
            return Ready(self._work(plan))
        return Late(lambda: self._work(plan))

    def _work(self, plan):
        if self.breaks == plan.step_id:
            raise RuntimeError("the chip melted")
        self.results.append(plan.step_id)
        return self.worker.execute(plan)

    def shutdown(self):
        self.num_shutdowns += 1


def request(name, prompt=(1, 2, 3), **changes):
    fields = {
        "request_id": name,
        "prompt_token_ids": tuple(prompt),
        "sampling_params": SamplingParams(max_tokens=4),
        "max_tokens": 4,
        "seed": 5,
    }
    return EngineCoreRequest(**(fields | changes))


@pytest.fixture
def make(drive):
    def build(depth=1, *, limits=None, **breaks):
        driver = drive(**(limits or {}))
        executor = Executor(driver.worker, depth, **breaks)
        core = EngineCore(executor, driver.scheduler, vocab_size=VOCAB, max_model_len=64)
        return core, executor

    return build


def run(core):
    """Run until all requests are finished. Return their tokens."""
    step = core.step if core.executor.max_concurrent_steps == 1 else core.step_with_batch_queue
    tokens = {}
    while core.has_work():
        outputs = step()
        if outputs is None:
            continue
        end = 0
        for name, count in zip(outputs.request_ids, outputs.num_new_tokens, strict=True):
            tokens.setdefault(name, []).extend(outputs.token_ids[end : end + count])
            end += count
    return tokens


def test_an_idle_engine_core_has_no_work(make):
    core, executor = make()
    assert not core.has_work()
    core.add_request(request("a"))
    assert core.has_work()
    run(core)
    assert not core.has_work()
    assert executor.results == [0, 1, 2, 3]


@pytest.mark.parametrize("depth", [1, 2])
def test_tokens_are_the_same_at_both_pipeline_depths(make, alone, depth):
    core, _ = make(depth, limits={"num_blocks": 8, "max_num_batched_tokens": 16})
    prompts = {f"r{i}": tuple(range(i, 2 * i + 3)) for i in range(9)}
    for name, prompt in prompts.items():
        core.add_request(request(name, prompt))
    assert run(core) == {name: alone(prompt, 4) for name, prompt in prompts.items()}


def test_at_depth_2_two_plans_are_in_flight_before_the_first_result(make):
    core, executor = make(2)
    core.add_request(request("a"))
    assert core.step_with_batch_queue() is None
    assert len(executor.plans) == 1 and executor.results == []
    assert core.step_with_batch_queue().request_ids == ["a"]
    assert len(executor.plans) == 2 and executor.results == [0]


def test_at_depth_2_a_plan_in_flight_counts_as_work(make):
    core, executor = make(2)
    core.add_request(request("a"))
    core.step_with_batch_queue()
    assert core.abort_requests(["a", "b"]) == ["a"]
    assert core.has_work()
    outputs = core.step_with_batch_queue()
    assert outputs.request_ids == [] and executor.results == [0]
    assert not core.has_work()
    assert core.step_with_batch_queue() is None


@pytest.mark.parametrize(
    ("changes", "parameter"),
    [
        ({"request_id": ""}, "request_id"),
        ({"request_id": 5}, "request_id"),
        ({"prompt_token_ids": ()}, "prompt"),
        ({"prompt_token_ids": (1, -1)}, "prompt"),
        ({"prompt_token_ids": (1, VOCAB)}, "prompt"),
        ({"prompt_token_ids": (1, 2**31)}, "prompt"),
        ({"prompt_token_ids": (1, 2**63)}, "prompt"),
        ({"prompt_token_ids": (1, "2")}, "prompt"),
        ({"prompt_token_ids": (1, True)}, "prompt"),
        ({"prompt_token_ids": (1, 2.0)}, "prompt"),
        ({"prompt_token_ids": (1,) * 64}, "prompt"),
        ({"sampling_params": None}, "sampling_params"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"priority": "high"}, "priority"),
        ({"priority": 2**63}, "priority"),
        ({"arrival_ns": -1}, "arrival_ns"),
        ({"cache_salt": b"x"}, "cache_salt"),
        ({"stop_token_ids": frozenset({VOCAB})}, "stop_token_ids"),
        ({"bad_words_token_ids": ((),)}, "bad_words"),
        ({"bad_words_token_ids": ((1, -2),)}, "bad_words"),
        ({"sampling_params": SamplingParams(logit_bias={VOCAB: 1.0})}, "logit_bias"),
        ({"sampling_params": SamplingParams(allowed_token_ids=[VOCAB])}, "allowed_token_ids"),
        ({"sampling_params": SamplingParams(stop_token_ids=[VOCAB])}, "stop_token_ids"),
    ],
)
def test_an_invalid_request_is_rejected_and_other_requests_continue(
    make, alone, changes, parameter
):
    core, _ = make()
    core.add_request(request("victim"))
    first = core.step()
    with pytest.raises(RequestError) as rejection:
        core.add_request(dataclasses.replace(request("bad"), **changes))
    assert rejection.value.parameter == parameter
    assert list(first.token_ids) + run(core)["victim"] == alone((1, 2, 3), 4)


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", float("nan")), ("top_p", 7.0), ("top_k", -3), ("n", 0), ("min_tokens", 99)],
)
def test_the_core_checks_parameters_that_bypassed_validation(make, name, value):
    core, _ = make()
    params = SamplingParams(max_tokens=4)
    object.__setattr__(params, name, value)
    with pytest.raises(RequestError) as rejection:
        core.add_request(request("bad", sampling_params=params))
    assert rejection.value.parameter == name


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("where", ["execute", "sample"])
def test_a_failed_step_stops_the_engine_core_and_the_error_names_its_requests(make, depth, where):
    core, _ = make(depth, breaks=1, where=where)
    core.add_request(request("a", [SECRET] * 5))
    with pytest.raises(EngineDeadError, match="the chip melted") as ended:
        run(core)
    assert "step 1: 1 scheduled requests with 1 tokens" in ended.value.digest
    assert "row 0: positions 5..5" in ended.value.digest
    assert str(SECRET) not in str(ended.value)  # the message has no part of the prompt
    assert isinstance(ended.value.__cause__, RuntimeError)
    calls = (
        core.step,
        core.step_with_batch_queue,
        lambda: core.add_request(request("b")),
        lambda: core.pause(PauseScope.ALL),
        core.resume,
        core.reset_prefix_cache,
    )
    for call in calls:
        with pytest.raises(EngineDeadError, match="create a new one"):
            call()


def test_the_prefix_cache_can_be_reset_when_the_engine_is_idle(make):
    core, _ = make()
    core.add_request(request("a", range(1, 10)))
    core.step()
    assert not core.reset_prefix_cache()
    run(core)
    assert core.reset_prefix_cache()


def test_the_statistics_are_sent_again_after_a_reset_that_ran_steps(make):
    core, _ = make(2)
    core.add_request(request("a", range(1, 10)))
    for _ in range(3):
        core.step_with_batch_queue()
    core.abort_requests(["a"])
    assert core.reset_prefix_cache()
    assert core.step_is_due()
    while core.step_is_due():
        core.step_with_batch_queue()
    assert core.get_stats().num_running == 0


def test_shutdown_of_the_engine_core_shuts_down_scheduler_and_executor(make):
    core, executor = make(2)
    core.add_request(request("a"))
    core.step_with_batch_queue()
    core.shutdown()
    core.shutdown()
    assert executor.num_shutdowns == 2 and not core.has_work()


def test_the_executor_is_shut_down_even_if_the_scheduler_fails_to_shut_down(make, monkeypatch):
    core, executor = make()
    monkeypatch.setattr(core.scheduler, "shutdown", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        core.shutdown()
    assert executor.num_shutdowns == 1
