"""Operations and steps in worker processes: values, errors and order."""

import threading
from types import SimpleNamespace

import pytest

from dovetail.errors import (
    ConfigError,
    ContractError,
    DovetailError,
    EngineDeadError,
    MessageError,
    PluginError,
)
from dovetail.executors.multiproc.executor import MultiprocExecutor
from dovetail.executors.worker_spec import check_plugins, describe_plugins
from dovetail.plugins import PluginRegistry, Resolution
from dovetail.transport.ndarray import NDArray
from dovetail_devkit.executor.plans import make_plans
from dovetail_devkit.suites.executor import executor_cases, start

PATIENCE_S = 20.0


def reported(*resolutions):
    """Return the bytes with which a worker reports its loaded plugins to the executor."""
    return describe_plugins(SimpleNamespace(resolutions=resolutions))


@pytest.mark.costly
@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    "case", list(executor_cases(MultiprocExecutor)), ids=lambda case: case.name
)
def test_the_multiproc_executor_meets_its_contract(case):
    case.run()


@pytest.mark.costly
def test_values_and_arrays_keep_their_types_across_processes(make):
    executor = make()
    values = [1, 2.5, "ü", b"\0", None, True, [1, [2]], {"a": {"b": 1}}]
    assert executor.collective_rpc("echo", args=values, kwargs={"k": 1}) == [[values, {"k": 1}]]
    weights = NDArray("bfloat16", (4, 1), bytes(range(8)))
    (turned,) = executor.collective_rpc("turned", args=(weights,))
    assert turned == NDArray("bfloat16", (1, 4), bytes(range(8))[::-1])


@pytest.mark.costly
def test_a_large_result_is_not_sent_through_the_ring(make):
    executor = make()
    ramp = executor.collective_rpc("ramp", args=(100_000,), unique_reply_rank=0)["ramp"]
    assert ramp.dtype == "float32" and ramp.shape == (100_000,)
    assert ramp.memory().tolist() == list(range(100_000))
    long = ["x" * 1_000_000]
    assert executor.collective_rpc("echo", args=long, unique_reply_rank=0) == [long, {}]


@pytest.mark.costly
def test_the_error_for_a_value_that_cannot_be_sent_names_the_value(make):
    executor = make()
    with pytest.raises(MessageError, match=r"builtins\.object cannot be sent"):
        executor.collective_rpc("echo", args=(object(),))
    with pytest.raises(MessageError, match=r"multiproc_parts\.FaultyWorker cannot be sent"):
        executor.collective_rpc("odd")
    with pytest.raises(DovetailError, match="ValueError: not today"):
        executor.collective_rpc("raise_value_error")
    with pytest.raises(DovetailError, match="TypeError"):
        executor.collective_rpc("pid", args=(1,))
    assert executor.collective_rpc("echo") == [[[], {}]]


@pytest.mark.costly
def test_only_module_functions_can_be_called_by_name(make):
    executor = make()
    (pid,) = executor.collective_rpc("pid")
    assert executor.collective_rpc("multiproc_parts:both", args=(1,)) == [pid + 1]
    for name in ("multiproc_parts:NotAFunction", "multiproc_parts:os.kill", "os:kill", ":", "x:"):
        with pytest.raises(ContractError, match="operation"):
            executor.collective_rpc(name)
    with pytest.raises(ContractError, match="cannot be called in another process"):
        executor.collective_rpc(lambda worker: 1)


@pytest.mark.costly
def test_more_calls_than_fit_into_the_rings_do_not_block(make):
    executor = make(2)
    handles = [
        executor.collective_rpc("echo", args=(number, "x" * 9000), non_block=True)
        for number in range(100)
    ]
    for number in (99, 0, 50):
        results = handles[number].result(PATIENCE_S)
        assert [response[0][0] for response in results] == [number, number]


@pytest.mark.costly
def test_a_call_that_times_out_does_not_affect_later_calls(make):
    executor = make(2)
    start(executor)
    with pytest.raises(TimeoutError):
        executor.collective_rpc("delay", args=(0.2,), timeout=0.05)
    executor.execute_model(make_plans()[0])
    step = executor.sample_tokens()
    assert not step.done()
    assert executor.collective_rpc("echo", args=(7,), unique_reply_rank=1) == [[7], {}]
    assert step.done() and step.result(0).step_id == 0


@pytest.mark.costly
def test_execute_model_can_be_awaited_before_sampling(make):
    executor = make(step=["is slow"])
    start(executor)
    first, second, *_ = make_plans()
    for plan in (first, second):
        executed = executor.execute_model(plan)
        assert executed.result(PATIENCE_S) is None and executed.done()
        assert executor.sample_tokens().result(PATIENCE_S).step_id == plan.step_id


@pytest.mark.costly
def test_threads_can_call_the_executor_concurrently(make):
    executor = make(2)
    invalid = []

    def ask(thread):
        for number in range(50):
            actual = executor.collective_rpc(
                "echo", args=(thread, number), unique_reply_rank=number % 2
            )
            if actual != [[thread, number], {}]:
                invalid.append(actual)

    threads = [threading.Thread(target=ask, args=(thread,)) for thread in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not invalid and not any(thread.is_alive() for thread in threads)


@pytest.mark.costly
def test_the_worker_receives_its_options_and_its_extension(make, parts):
    executor = make(2, config={"worker_extension_cls": parts.Extra}, color="red", sizes=[1, 2])
    assert executor.collective_rpc("options") == [{"color": "red", "sizes": [1, 2]}] * 2
    assert executor.collective_rpc("twice") == [0, 2]


@pytest.mark.costly
def test_calls_after_shutdown_raise_an_error(make):
    executor = make()
    executor.shutdown()
    executor.shutdown()
    assert executor.silence_s() == 0.0
    for call in (
        executor.check_health,
        lambda: executor.collective_rpc("pid"),
        lambda: executor.execute_model(make_plans()[0]),
    ):
        with pytest.raises(EngineDeadError, match="was shut down"):
            call()


@pytest.mark.costly
def test_shutdown_raises_an_error_in_waiting_callers(make):
    executor = make(limits={"stop_timeout_s": 0.2})
    waiting = executor.collective_rpc("delay", args=(30,), non_block=True)
    unread = executor.collective_rpc("pid", non_block=True)
    messages = []

    def wait():
        try:
            waiting.result()
        except EngineDeadError as error:
            messages.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    executor.shutdown()
    thread.join(PATIENCE_S)
    assert messages == ["The executor was shut down."]
    assert waiting.done() and unread.done()
    with pytest.raises(EngineDeadError, match="was shut down"):
        unread.result()


@pytest.mark.costly
def test_options_that_cannot_be_sent_are_reported(make):
    with pytest.raises(ConfigError, match="options cannot be sent to its process"):
        make(place=object())


@pytest.mark.costly
def test_a_worker_that_another_process_cannot_import_is_rejected(make, parts):
    class Local(parts.FaultyWorker):
        pass

    with pytest.raises(ContractError, match="at the top level of an importable module"):
        make(worker_cls=Local)


def test_the_error_for_plugins_that_differ_between_ranks_names_them():
    def found(version):
        return Resolution(kind="ops", name="fast", target="a:B", distribution="a", version=version)

    registry = PluginRegistry()
    check_plugins(registry, [reported(found("1")), reported(found("1"))])
    with pytest.raises(PluginError, match=r"'fast' is not the same on all ranks.*1\) on rank 0"):
        check_plugins(registry, [reported(found("1")), reported(found("2"))])
    with pytest.raises(PluginError, match="not loaded on rank 1"):
        check_plugins(registry, [reported(found("1")), reported()])


def test_the_error_for_plugins_that_differ_from_the_engines_names_them(monkeypatch):
    registry = PluginRegistry()
    registry.load("executor", "uniproc")
    (own,) = registry.resolutions
    kwargs = {"kind": own.kind, "name": own.name, "target": own.target, "distribution": "x"}
    check_plugins(registry, [reported(own)])
    with pytest.raises(PluginError, match=r"the workers have executor 'uniproc' of x"):
        check_plugins(registry, [reported(Resolution(version="9", **kwargs))])


@pytest.mark.costly
def test_result_sizes_above_the_limit_are_rejected_at_startup(make):
    with pytest.raises(ConfigError, match="max_logprobs=1024 "):
        make(config={"max_logprobs": 1024, "max_num_batched_tokens": 1 << 17})
