"""The conformance suite of the executor contract, for any executor.

The suite uses its own workers (`dovetail_devkit.executor.workers`), without a model or device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any

from dovetail.errors import ContractError, EngineDeadError, ModelError
from dovetail.interfaces.executor import Executor
from dovetail.interfaces.kv_cache import KVCacheConfig
from dovetail.interfaces.scheduler import SchedulerLimits
from dovetail.interfaces.worker import WorkerBase
from dovetail.kv_cache.grouping import group_layers
from dovetail.result import ModelRunnerOutput
from dovetail_devkit.case import Case
from dovetail_devkit.contexts import SMALL_ENGINE, make_executor_context, write_fake_config
from dovetail_devkit.executor.plans import make_plans
from dovetail_devkit.executor.ranks import check_transfers
from dovetail_devkit.executor.workers import (
    REQUESTED,
    SLOW_S,
    CallOrderWorker,
    FailingWorker,
    LateFailingWorker,
    LateWorker,
    SlowWorker,
    UnloadableWorker,
    count_calls,
    read_log,
)
from dovetail_devkit.expectation import SkipCase, checking, expect, expect_error
from dovetail_devkit.fakes.worker import DEFAULT_VOCAB_SIZE
from dovetail_devkit.rows.model import RowModel

NUM_BLOCKS = 33
RESULT_S = 30.0
"""Timeout for each result, in seconds."""

_START = [
    "init_device",
    "load_model",
    "get_model_info",
    "get_kv_cache_spec",
    "determine_available_memory",
    "initialize_cache",
    "compile_or_warm_up_model",
]


def check_executor(executor_cls: type[Executor]) -> None:
    """Check an executor against its contract. Raise AssertionError with the violated rule."""
    for case in executor_cases(executor_cls):
        with suppress(SkipCase):
            case.run()


def executor_cases(executor_cls: type[Executor]) -> Iterator[Case]:
    """Yield the suite's cases. Most run with one and with two concurrent steps."""
    yield Case(name="a load error is raised", run=partial(_check_unloadable, executor_cls))
    yield Case(name="shutdown waits for a step", run=partial(_check_end, executor_cls))
    if executor_cls.max_world_size > 1:
        yield Case(name="two workers", run=partial(_check_ranks, executor_cls))
        run = partial(check_transfers, executor_cls, start, make_plans())
        yield Case(name="two workers transfer KV blocks", run=run)
    for ahead in (False, True):
        steps = 2 if ahead else 1
        for name, check in _CHECKS.items():
            worker_cls = FailingWorker if check is _check_failure else CallOrderWorker
            run = partial(_check_with, executor_cls, worker_cls, check, ahead=ahead)
            yield Case(name=f"{name}, concurrent steps: {steps}", run=run)
        for name, (worker_cls, check) in _LATE_CHECKS.items():
            run = partial(_check_with, executor_cls, worker_cls, check, ahead=ahead)
            yield Case(name=f"{name}, concurrent steps: {steps}", run=run)
    run = partial(_check_with, executor_cls, CallOrderWorker, _check_timeout, ahead=True)
    yield Case(name="timeout, concurrent steps: 2", run=run)


def _check_with(
    executor_cls: type[Executor],
    worker_cls: type[CallOrderWorker],
    check: Callable[[Executor], None],
    *,
    ahead: bool,
) -> None:
    """Run a check on a new executor with a worker of the class `worker_cls`."""
    with TemporaryDirectory() as folder:
        with checking("executor constructor"):
            executor = _make(executor_cls, worker_cls, Path(folder), ahead=ahead)
        with checking(f"{check.__name__}, async_scheduling={ahead}"):
            try:
                _check_depth(executor, ahead=ahead)
                check(executor)
            finally:
                executor.shutdown()
            expect("shutdown" in read_log(Path(folder)), "executor.shutdown must shut down workers")


def _check_depth(executor: Executor, *, ahead: bool) -> None:
    maximum = executor.max_concurrent_steps
    expect(maximum in range(1, 5), f"max_concurrent_steps is {maximum}; it must be 1 to 4")
    expect(
        ahead or maximum == 1,
        f"max_concurrent_steps is {maximum}; with async_scheduling=False it must be 1",
    )
    if ahead and maximum == 1:
        raise SkipCase("the executor runs one step at a time")


def _check_unloadable(executor_cls: type[Executor]) -> None:
    rule = "the constructor of the executor must raise an error of the worker's load_model"
    with TemporaryDirectory() as folder:
        make = partial(_make, executor_cls, UnloadableWorker, Path(folder), ahead=False)
        expect_error(ModelError, make, rule)
        expect(
            "shutdown" in read_log(Path(folder)),
            "the executor must shut down a worker that fails to load its model",
        )


def _check_end(executor_cls: type[Executor]) -> None:
    """Check that shutdown waits for the current step of the worker."""
    with checking("executor shutdown"), TemporaryDirectory() as folder:
        executor = _make(executor_cls, SlowWorker, Path(folder), ahead=True)
        start(executor)
        executor.execute_model(make_plans()[0])
        executor.shutdown()
        Event().wait(2 * SLOW_S)
        log = read_log(Path(folder))
        expect(
            log[-1:] == ["shutdown"], f"the worker recorded {log}; shutdown must be the last call"
        )


def _check_ranks(executor_cls: type[Executor]) -> None:
    """Check that every rank runs every step and operation. Results are ordered by rank."""
    with checking("two workers"), TemporaryDirectory() as folder:
        model_dir = write_fake_config(Path(folder))
        executor = executor_cls(
            make_executor_context(model_dir, CallOrderWorker, tensor_parallel_size=2)
        )
        try:
            _check_steps(executor)
            infos = executor.collective_rpc("location")
            ranks = [(info["rank"], info["world_size"]) for info in infos]
            expect(
                ranks == [(0, 2), (1, 2)],
                f"the workers have (rank, world_size) {ranks}; expected (0, 2) and (1, 2)",
            )
            meet = {info["rendezvous"] for info in infos}
            expect(
                len(meet) == 1 and "" not in meet,
                f"the workers have the rendezvous addresses {meet}; expected one address for all",
            )
            second = executor.collective_rpc("location", unique_reply_rank=1)
            expect(
                second == infos[1],
                f"collective_rpc with unique_reply_rank=1 returns {second}; expected {infos[1]}",
            )
            rule = "collective_rpc must raise if the operation fails on one rank"
            fail = partial(executor.collective_rpc, "fail_on", args=(1,))
            expect_error(ModelError, partial(fail, unique_reply_rank=0), rule)
        finally:
            executor.shutdown()
        log = read_log(Path(folder))
        expect(
            log == ["shutdown"] * 2,
            f"two workers must be shut down once each; they recorded {log}",
        )


def _make(
    executor_cls: type[Executor], worker_cls: type[WorkerBase], folder: Path, *, ahead: bool
) -> Executor:
    model_dir = write_fake_config(folder)
    return executor_cls(make_executor_context(model_dir, worker_cls, async_scheduling=ahead))


def start(executor: Executor) -> KVCacheConfig:
    """Complete the startup of an executor's workers, as an engine does."""
    vocab_size = executor.get_model_info().vocab_size
    expect(
        vocab_size == DEFAULT_VOCAB_SIZE,
        f"get_model_info returns vocab_size={vocab_size}, but the worker's is {DEFAULT_VOCAB_SIZE}",
    )
    specs = executor.get_kv_cache_specs()
    expect(
        isinstance(specs, list) and bool(specs),
        f"get_kv_cache_specs returns {specs!r}; expected a list with one mapping per worker",
    )
    available = executor.determine_available_memory()
    expect(
        available > 0,
        f"determine_available_memory returns {available}, which is less than the worker's value",
    )
    groups = group_layers(
        specs,
        block_size=SMALL_ENGINE["block_size"],
        max_model_len=SMALL_ENGINE["max_model_len"],
    )
    kv_cache = KVCacheConfig(num_blocks=NUM_BLOCKS, groups=groups)
    executor.initialize_cache(kv_cache)
    executor.check_health()
    return kv_cache


def _right_results(kv_cache: KVCacheConfig) -> list[ModelRunnerOutput]:
    limits = SchedulerLimits(
        max_num_seqs=SMALL_ENGINE["max_num_seqs"],
        max_num_batched_tokens=SMALL_ENGINE["max_num_batched_tokens"],
        max_model_len=SMALL_ENGINE["max_model_len"],
    )
    rows = RowModel(limits, kv_cache, DEFAULT_VOCAB_SIZE)
    results = []
    for plan in make_plans():
        rows.execute(plan)
        results.append(rows.sample())
    return results


def _calls(executor: Executor) -> list[str]:
    calls: list[str] = executor.collective_rpc("recorded_calls")[0]
    return calls


def _check_start(executor: Executor) -> None:
    calls = _calls(executor)
    expect(
        calls == _START[:2],
        f"the executor's constructor calls the worker's methods {calls}; expected {_START[:2]}",
    )
    start(executor)
    calls = [name for name in _calls(executor) if name in _START]
    expect(
        calls == _START,
        f"the start of the executor calls the worker's methods {calls}; expected {_START}",
    )


def _check_steps(executor: Executor) -> None:
    """Check that plans run in order and are sampled once. Results may be read in any order."""
    kv_cache = start(executor)
    expected = _right_results(kv_cache)
    maximum = executor.max_concurrent_steps
    actual: list[ModelRunnerOutput] = []
    plans = make_plans()
    for first in range(0, len(plans), maximum):
        handles = []
        for plan in plans[first : first + maximum]:
            executed = executor.execute_model(plan)
            handles.append((executed, executor.sample_tokens()))
        results = [sampled.result(RESULT_S) for _, sampled in handles[::-1]][::-1]
        for executed, sampled in handles:
            expect(executed.result(RESULT_S) is None, "the result of execute_model must be None")
            done = executed.done() and sampled.done()
            expect(done, "done() of a handle must return True after result()")
            again = sampled.result(RESULT_S)
            expect(again in results, "two calls of result() must return the same result")
        actual += results
    for index, (result, right) in enumerate(zip(actual, expected, strict=True)):
        expect(result == right, f"the result of plan {index} is {result}; expected {right}")
    steps = [name for name in _calls(executor) if name in ("execute_model", "sample_tokens")]
    expect(
        steps == ["execute_model", "sample_tokens"] * len(plans),
        f"the executor calls the worker's methods {steps}; expected execute_model and "
        f"sample_tokens alternately, once for each plan",
    )
    threads = executor.collective_rpc("num_threads")
    expect(
        threads == [1] * len(threads),
        f"the step methods of each worker were called by {threads} threads; expected one thread",
    )


def _check_operations(executor: Executor) -> None:
    call = partial(executor.collective_rpc, "add", args=(2,), kwargs={"right": 3})
    sums = call()
    expect(sums == [5] * len(sums) != [], f"collective_rpc('add') returns {sums}; expected [5]")
    result = call(unique_reply_rank=0)
    expect(result == 5, f"collective_rpc with unique_reply_rank=0 returns {result}; expected 5")
    rule = "collective_rpc must reject a rank that does not exist"
    expect_error(ContractError, partial(call, unique_reply_rank=len(sums)), rule)
    handles = [call(non_block=True), call(non_block=True, unique_reply_rank=0)]
    for handle, due in zip(handles[::-1], (result, sums), strict=True):
        expect(
            hasattr(handle, "result"),
            f"collective_rpc with non_block=True returns {handle!r}; expected a handle",
        )
        late = handle.result(RESULT_S)
        expect(late == due, f"the result of a collective_rpc handle is {late}; expected {due}")
        expect(handle.done(), "done() of a collective_rpc handle must return True after result()")
    named = f"{count_calls.__module__}:{count_calls.__name__}"
    sums = executor.collective_rpc(named, args=(10,))
    expect(sums == [12] * len(sums), f"collective_rpc({named!r}) returns {sums}; expected [12]")
    for name in ("no_such_operation", "calls", "no_such_module:f", "builtins:print", "os:system"):
        rule = f"collective_rpc must reject the unknown operation {name!r}"
        expect_error(ContractError, partial(executor.collective_rpc, name), rule)
    rule = "collective_rpc must raise the error of an operation that fails"
    expect_error(ModelError, partial(executor.collective_rpc, "fail_on", args=(0,)), rule)
    executor.check_health()
    calls = _calls(executor)
    expect(
        calls == _START[:2],
        f"after collective_rpc the worker recorded the calls {calls}; expected {_START[:2]}",
    )


def _check_callables(executor: Executor) -> None:
    call = partial(executor.collective_rpc, count_calls, args=(10,))
    if not executor.takes_callables:
        rule = "collective_rpc must reject a callable unless the executor declares takes_callables"
        expect_error(ContractError, call, rule)
        return
    sums = call()
    expect(sums == [12] * len(sums), f"collective_rpc of a callable returns {sums}; expected [12]")


def _check_timeout(executor: Executor) -> None:
    expect_error(
        TimeoutError,
        lambda: executor.collective_rpc("delay", args=(0.3,), timeout=0.02),
        "collective_rpc must raise when its timeout has passed",
    )
    values = executor.collective_rpc("delay", args=(0.0,), timeout=RESULT_S)
    expect(
        values == ["done"] * len(values),
        f"a collective_rpc call after a timeout returns {values}, which is not the result of this "
        f"call",
    )


def _check_failure(executor: Executor) -> None:
    """Check that a failing step raises, and that every later call raises EngineDeadError."""
    start(executor)
    plans = make_plans()
    for plan in plans[:2]:
        executor.execute_model(plan)
        executor.sample_tokens().result(RESULT_S)

    def fail() -> None:
        executed = executor.execute_model(plans[2])
        sampled = executor.sample_tokens()
        executed.result(RESULT_S)
        sampled.result(RESULT_S)

    error = expect_error(Exception, fail, "the result of a step must raise if the worker fails")
    expect(
        REQUESTED in _messages(error),
        f"the error of a failed step must contain the worker's error; it is {error!r}",
    )
    later: tuple[tuple[str, Callable[[], Any]], ...] = (
        ("check_health", executor.check_health),
        ("execute_model", lambda: executor.execute_model(plans[3]).result(RESULT_S)),
        ("sample_tokens", lambda: executor.sample_tokens().result(RESULT_S)),
        ("collective_rpc", lambda: executor.collective_rpc("recorded_calls")),
    )
    for name, call in later:
        expect_error(EngineDeadError, call, f"{name} must raise after a failed step")


def _messages(error: BaseException | None) -> str:
    """Return the messages of an error and its causes."""
    return "" if error is None else f"{error!r}\n{_messages(error.__cause__)}"


def _check_shutdown(executor: Executor) -> None:
    start(executor)
    executor.shutdown()
    executor.shutdown()
    plan = make_plans()[0]
    expect_error(EngineDeadError, executor.check_health, "check_health must raise after shutdown")
    expect_error(
        EngineDeadError,
        lambda: executor.execute_model(plan).result(RESULT_S),
        "execute_model must raise after shutdown",
    )


_CHECKS: Mapping[str, Callable[[Executor], None]] = {
    "start": _check_start,
    "steps": _check_steps,
    "operations": _check_operations,
    "callables": _check_callables,
    "failure": _check_failure,
    "shutdown": _check_shutdown,
}

_LATE_CHECKS: Mapping[str, tuple[type[CallOrderWorker], Callable[[Executor], None]]] = {
    "workers that return handles are supported": (LateWorker, _check_steps),
    "an error of a result is raised": (LateFailingWorker, _check_failure),
}
