"""The executor suite detects faulty executors: each mutant has one fault."""

import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from dovetail.errors import ContractError
from dovetail.executors.multiproc import responses
from dovetail.executors.multiproc.executor import MultiprocExecutor
from dovetail.executors.uniproc import UniprocExecutor
from dovetail.interfaces import Ready
from dovetail_devkit.executor.plans import make_plans
from dovetail_devkit.executor.ranks import check_transfers
from dovetail_devkit.fakes.executor import FakeExecutor
from dovetail_devkit.suites.executor import check_executor, start


class Reorders(UniprocExecutor):
    """With two plans in flight, executes the second plan first."""

    def __init__(self, context):
        self._held = []
        super().__init__(context)

    def execute_model(self, plan):
        self._held.append(plan)
        if self.max_concurrent_steps == 1 or len(self._held) == 2:
            for held in self._held[::-1]:
                done = super().execute_model(held)
                self._sampled = super().sample_tokens()
            self._held = []
            return done
        return Ready(None)

    def sample_tokens(self, grammar=None):
        self.check_health()
        return self._sampled if hasattr(self, "_sampled") else Ready(None)


class ExecutesTwice(FakeExecutor):
    """Executes each plan a second time before sampling."""

    def execute_model(self, plan):
        self.plan = plan
        return super().execute_model(plan)

    def sample_tokens(self, grammar=None):
        result = super().sample_tokens(grammar)
        self._try(self.worker.execute_model, self.plan)
        return result


class SamplesLate(FakeExecutor):
    """Returns the result of the previous step."""

    last = None

    def sample_tokens(self, grammar=None):
        result = super().sample_tokens(grammar)
        late, self.last = self.last or result, result
        return late


class ContinuesAfterAFailure(FakeExecutor):
    """Continues to execute plans after its worker has failed."""

    def check_health(self):
        pass


class HidesFailures(FakeExecutor):
    """Returns None as the result of a failed step."""

    def _try(self, call, argument):
        try:
            return super()._try(call, argument)
        except Exception:
            return None


class HidesTheCause(FakeExecutor):
    """Raises an error that does not mention the worker's error."""

    def _try(self, call, argument):
        self.check_health()
        try:
            return call(argument)
        except Exception:
            self._dead = "?"
            raise ContractError("something went wrong") from None


class ReturnsNoList(FakeExecutor):
    """Returns the result of collective_rpc itself instead of a list with it."""

    def collective_rpc(self, operation, **more):
        actual = super().collective_rpc(operation, **more)
        return actual[0] if isinstance(actual, list) else actual


class AcceptsUnknownOperations(FakeExecutor):
    """Returns None for unknown operations of collective_rpc."""

    def collective_rpc(self, operation, **more):
        named = isinstance(operation, str) and ":" not in operation
        if named and not hasattr(self.worker, operation):
            return [None]
        return super().collective_rpc(operation, **more)


class DropsKeywords(FakeExecutor):
    """Passes positional arguments only."""

    def collective_rpc(self, operation, *, args=(), kwargs=None, **more):
        return super().collective_rpc(operation, args=(*args, *(kwargs or {}).values()), **more)


class ReturnsAllRanks(FakeExecutor):
    """Returns a list although one rank's result is requested."""

    def collective_rpc(self, operation, *, unique_reply_rank=None, **more):
        return super().collective_rpc(operation, **more)

    def get_model_info(self):
        return self.collective_rpc("get_model_info")[0]


class ReturnsNoHandle(FakeExecutor):
    """Returns a result instead of a handle."""

    def collective_rpc(self, operation, *, non_block=False, **more):
        return super().collective_rpc(operation, **more)


class RejectsQualifiedNames(FakeExecutor):
    """Cannot call functions by qualified name."""

    def collective_rpc(self, operation, **more):
        if isinstance(operation, str) and ":" in operation:
            raise ContractError(f"no operation {operation!r}")
        return super().collective_rpc(operation, **more)


class SkipsTheWarmUp(FakeExecutor):
    """Does not call the worker's warm-up."""

    def initialize_cache(self, kv_cache_config):
        self.collective_rpc("initialize_cache", args=(kv_cache_config,))


class FailsAtTheSecondShutdown(FakeExecutor):
    """Cannot be shut down twice."""

    def shutdown(self):
        del self.worker


class IgnoresTimeouts(UniprocExecutor):
    """Ignores timeouts."""

    def collective_rpc(self, operation, *, timeout=None, **more):
        return super().collective_rpc(operation, **more)


class NeverDone(FakeExecutor):
    """Returns handles that never report that they are done."""

    def sample_tokens(self, grammar=None):
        handle = super().sample_tokens(grammar)
        future = Future()
        future.set_result(handle.result())
        future.done = lambda: False
        return future


class TwoThreads(UniprocExecutor):
    """Calls the worker from two threads at the same time."""

    def __init__(self, context):
        super().__init__(context)
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = ThreadPoolExecutor(max_workers=2)

    def execute_model(self, plan):
        done = super().execute_model(plan)
        if self._thread is not None:
            self._thread.submit(time.sleep, 0.02)
        return done


class ShutsDownDuringAStep(UniprocExecutor):
    """Shuts its worker down during a step."""

    def shutdown(self):
        if not self._closed and self._thread is not None:
            self._thread.shutdown(wait=False)
            self._closed = True
            self._worker.shutdown()
        super().shutdown()


class KeepsItsWorkerRunning(FakeExecutor):
    """Does not shut its worker down."""

    def shutdown(self):
        self._dead = "it was shut down"


class AlwaysRunsAhead(UniprocExecutor):
    """Always has two steps in flight."""

    def __init__(self, context):
        super().__init__(context)
        self.max_concurrent_steps = 2


class ReturnsTheWorkersHandle(UniprocExecutor):
    """Returns a worker's handle instead of the result."""

    def sample_tokens(self, grammar=None):
        if not self._is_late:
            return super().sample_tokens(grammar)
        return self._step(self._worker.sample_tokens, grammar)


class IgnoresFailuresOfHandles(UniprocExecutor):
    """Continues to execute plans after an error in a worker's handle."""

    def _fail(self, error):
        late = self._is_late
        try:
            super()._fail(error)
        finally:
            if late:
                self._failure = None


MUTANTS = [
    ReturnsTheWorkersHandle,
    IgnoresFailuresOfHandles,
    TwoThreads,
    ShutsDownDuringAStep,
    KeepsItsWorkerRunning,
    AlwaysRunsAhead,
    Reorders,
    ExecutesTwice,
    SamplesLate,
    ContinuesAfterAFailure,
    HidesFailures,
    HidesTheCause,
    ReturnsNoList,
    AcceptsUnknownOperations,
    DropsKeywords,
    ReturnsAllRanks,
    ReturnsNoHandle,
    RejectsQualifiedNames,
    SkipsTheWarmUp,
    FailsAtTheSecondShutdown,
    IgnoresTimeouts,
    NeverDone,
]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_faulty_executor_is_detected(mutant):
    with pytest.raises(AssertionError):
        check_executor(mutant)


@pytest.mark.costly
def test_an_executor_that_reads_only_the_transfers_of_rank_0_is_detected(monkeypatch):
    """Simulates an executor that returns rank 0's result unchanged."""
    monkeypatch.setattr(responses, "aggregate_outputs", lambda outputs: outputs[0])
    with pytest.raises((AssertionError, ContractError), match="all ranks"):
        check_transfers(MultiprocExecutor, start, make_plans())
