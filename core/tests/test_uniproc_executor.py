import threading
from array import array
from typing import ClassVar

import pytest

from dovetail.errors import CapacityError, ContractError, EngineDeadError
from dovetail.executors.uniproc import UniprocExecutor
from dovetail.interfaces import ExecutorContext, KVCacheConfig, ModelInfo, Ready
from dovetail.plan import StepBuilder
from dovetail.result import ModelRunnerOutput
from dovetail_devkit.contexts import make_config, write_fake_config


class Worker:
    """A worker that records calls and threads. fails: maps a method to the error that it raises."""

    made: ClassVar[list] = []
    fail_at_start: ClassVar[dict] = {}

    def __init__(self, context):
        self.context, self.calls, self.fails = context, [], dict(Worker.fail_at_start)
        self.gate = threading.Event()
        self.gate.set()
        Worker.made.append(self)

    def _note(self, name, *arguments):
        self.calls.append((name, *arguments))
        self.thread = threading.current_thread()
        if name in self.fails:
            raise self.fails[name]

    def init_device(self):
        self._note("init_device")

    def load_model(self):
        self._note("load_model")

    def get_model_info(self):
        return ModelInfo(vocab_size=7)

    def get_kv_cache_spec(self):
        return {"layer": "spec"}

    def determine_available_memory(self):
        return 1000

    def initialize_cache(self, config):
        self._note("initialize_cache", config)

    def compile_or_warm_up_model(self):
        self._note("compile_or_warm_up_model")

    def execute_model(self, plan):
        self.gate.wait(5)
        self.plan = plan
        self._note("execute_model", plan.step_id)

    def sample_tokens(self, grammar=None):
        self._note("sample_tokens", grammar)
        return ModelRunnerOutput(
            step_id=self.plan.step_id, num_sampled=array("B"), token_ids=array("i")
        )

    def add(self, left, right=0):
        return left + right

    def shutdown(self):
        self._note("shutdown")


@pytest.fixture(params=[False, True], ids=["depth1", "depth2"])
def asynchronous(request):
    return request.param


@pytest.fixture
def make(asynchronous, tmp_path):
    requested = {"async_scheduling": asynchronous}
    config = make_config(write_fake_config(tmp_path), **requested).executor_config()

    def build(worker_cls=Worker, **fails):
        Worker.made, Worker.fail_at_start = [], fails
        context = ExecutorContext(
            config=config,
            platform="platform",
            plugins="plugins",
            worker_cls=worker_cls,
        )
        return UniprocExecutor(context), Worker.made[0]

    yield build
    for worker in Worker.made:
        worker.gate.set()


def step(executor, builder):
    executor.execute_model(builder.build())
    return executor.sample_tokens()


def test_the_worker_is_constructed_and_loads_its_model(make, asynchronous):
    executor, worker = make()
    assert worker.context.platform == "platform" and worker.context.plugins == "plugins"
    assert worker.calls == [("init_device",), ("load_model",)]
    assert executor.max_concurrent_steps == (2 if asynchronous else 1)
    executor.shutdown()


def test_a_failed_start_shuts_the_worker_down(make):
    with pytest.raises(CapacityError, match="no room"):
        make(load_model=CapacityError("no room"))
    (worker,) = Worker.made
    assert worker.calls[-1] == ("shutdown",)


def test_cache_and_warm_up_calls_are_forwarded_to_the_worker(make):
    executor, worker = make()
    config = KVCacheConfig(num_blocks=2, groups=())
    assert executor.get_model_info() == ModelInfo(vocab_size=7)
    assert executor.get_kv_cache_specs() == [{"layer": "spec"}]
    assert executor.determine_available_memory() == 1000
    executor.initialize_cache(config)
    assert worker.calls[2:] == [("initialize_cache", config), ("compile_or_warm_up_model",)]
    executor.shutdown()


def test_steps_run_in_order_and_each_step_samples_once(make):
    executor, worker = make()
    builder = StepBuilder()
    handles = [step(executor, builder) for _ in range(executor.max_concurrent_steps)]
    assert [handle.result(5).step_id for handle in handles] == list(range(len(handles)))
    halves = [(("execute_model", index), ("sample_tokens", None)) for index in range(len(handles))]
    assert worker.calls[2:] == [call for pair in halves for call in pair]
    executor.shutdown()


def test_at_depth_2_execute_model_does_not_block_the_caller(make, asynchronous):
    executor, worker = make()
    builder = StepBuilder()
    if asynchronous:
        worker.gate.clear()
    handles = [step(executor, builder) for _ in range(executor.max_concurrent_steps)]
    assert [handle.done() for handle in handles] == [not asynchronous] * len(handles)
    worker.gate.set()
    assert [handle.result(5).step_id for handle in handles] == list(range(len(handles)))
    assert (worker.thread is threading.main_thread()) == (not asynchronous)
    executor.shutdown()


def test_worker_operations_can_be_given_by_name_or_as_callables(make):
    executor, worker = make()
    assert executor.collective_rpc("add", args=(1,), kwargs={"right": 2}) == [3]
    assert executor.collective_rpc(lambda target, x: (target is worker, x), args=(5,)) == [
        (True, 5)
    ]
    executor.shutdown()


@pytest.mark.parametrize("name", ["fly", "context"])
def test_the_error_for_an_unknown_operation_names_the_operation(make, name):
    executor, _ = make()
    with pytest.raises(ContractError, match=f"Worker has no operation '{name}'"):
        executor.collective_rpc(name)
    executor.shutdown()


def test_a_call_in_a_worker_thread_can_time_out(make, asynchronous):
    executor, _ = make()
    if not asynchronous:
        executor.shutdown()
        return
    with pytest.raises(TimeoutError):
        executor.collective_rpc(lambda target: threading.Event().wait(0.2), timeout=0.01)
    executor.shutdown()


@pytest.mark.parametrize("where", ["execute_model", "sample_tokens"])
def test_a_failed_step_stops_the_executor(make, where):
    executor, worker = make()
    executor.check_health()
    worker.fails[where] = RuntimeError("the chip melted")
    with pytest.raises(EngineDeadError, match="the chip melted"):
        step(executor, StepBuilder()).result(5)
    calls = len(worker.calls)
    with pytest.raises(EngineDeadError, match="the chip melted"):
        executor.check_health()
    with pytest.raises(EngineDeadError):
        executor.execute_model(StepBuilder().build())
    with pytest.raises(EngineDeadError):
        executor.sample_tokens()
    assert len(worker.calls) == calls
    executor.shutdown()


def test_plans_after_a_failure_are_not_executed(make, asynchronous):
    executor, worker = make()
    if asynchronous:
        worker.gate.clear()
        worker.fails["execute_model"] = RuntimeError("the chip melted")
        builder = StepBuilder()
        handles = [step(executor, builder), step(executor, builder)]
        worker.gate.set()
        for handle in handles:
            with pytest.raises(EngineDeadError, match="the chip melted"):
                handle.result(5)
        assert [call for call in worker.calls if call[0] != "shutdown"][2:] == [
            ("execute_model", 0)
        ]
    executor.shutdown()


def test_dovetail_errors_of_the_worker_keep_their_type(make):
    executor, worker = make()
    worker.fails["sample_tokens"] = CapacityError("no room")
    with pytest.raises(CapacityError, match="no room"):
        step(executor, StepBuilder()).result(5)
    executor.shutdown()


def test_a_failed_operation_between_steps_does_not_stop_the_executor(make):
    executor, _ = make()
    with pytest.raises(TypeError):
        executor.collective_rpc("add")
    executor.check_health()
    executor.shutdown()


def test_a_second_shutdown_does_not_shut_down_the_worker_again(make):
    executor, worker = make()
    executor.shutdown()
    executor.shutdown()
    assert worker.calls.count(("shutdown",)) == 1
    with pytest.raises(EngineDeadError, match="was shut down"):
        executor.check_health()


def test_a_finished_result_handle_returns_its_result():
    handle = Ready(5)
    assert handle.done() and handle.result() == handle.result(timeout=0) == 5


class LateHandle:
    """A result handle that counts calls and raises the worker's error for "result", if any."""

    def __init__(self, worker, output):
        self.worker, self.output, self.num_requested = worker, output, 0

    def done(self):
        return False

    def result(self, timeout=None):
        self.num_requested += 1
        if "result" in self.worker.fails:
            raise self.worker.fails["result"]
        return self.output


class LateWorker(Worker):
    """A worker that returns result handles instead of results."""

    provides = frozenset({"async_output"})

    def sample_tokens(self, grammar=None):
        self.late = LateHandle(self, super().sample_tokens(grammar))
        return self.late


def test_a_worker_that_returns_handles_runs_in_the_thread_of_the_caller(make, asynchronous):
    executor, worker = make(LateWorker)
    handle = step(executor, StepBuilder())
    assert worker.thread is threading.current_thread()
    assert worker.late.num_requested == (0 if asynchronous else 1)
    assert handle.done() == (not asynchronous)
    assert handle.result(5) is worker.late.output and worker.late.num_requested == 1
    executor.shutdown()


@pytest.mark.parametrize("timeout", [0.01, None])
def test_a_timeout_of_a_result_handle_does_not_stop_the_executor(make, asynchronous, timeout):
    executor, worker = make(LateWorker)
    worker.fails["result"] = TimeoutError("not yet")
    is_asked_in_time = asynchronous and timeout is not None
    with pytest.raises(TimeoutError if is_asked_in_time else EngineDeadError, match="not yet"):
        step(executor, StepBuilder()).result(timeout)
    if is_asked_in_time:
        executor.check_health()
    executor.shutdown()


@pytest.mark.parametrize("error", [RuntimeError("on the device"), CapacityError("on the device")])
def test_an_error_in_a_result_handle_stops_the_executor(make, error):
    executor, worker = make(LateWorker)
    worker.fails["result"] = error
    with pytest.raises((EngineDeadError, CapacityError), match="on the device"):
        step(executor, StepBuilder()).result(5)
    with pytest.raises(EngineDeadError, match="on the device"):
        executor.check_health()
    executor.shutdown()


def test_a_worker_can_return_a_result_handle_that_is_already_finished(make):
    executor, _ = make(type("AtOnce", (Worker,), {"provides": LateWorker.provides}))
    assert step(executor, StepBuilder()).result(5).step_id == 0
    executor.shutdown()
