"""The scheduler suite detects faulty schedulers: each mutant has one fault."""

import random
from dataclasses import replace

import pytest
from conformance.messages import expect_rule_first

from dovetail.errors import RequestError
from dovetail.kv_cache import hashing, manager
from dovetail.scheduling import Scheduler
from dovetail.scheduling.draft import StepDraft
from dovetail.scheduling.mechanism import Mechanism
from dovetail_devkit.fakes.scheduler import FakeScheduler
from dovetail_devkit.suites.scheduler import check_scheduler


def with_mechanism(mechanism_cls):
    """Return a scheduler with the mechanism `mechanism_cls`."""

    class Mutant(Scheduler):
        __doc__ = mechanism_cls.__doc__

        def __init__(self, context):
            super().__init__(context)
            self._mechanism.__class__ = mechanism_cls

    Mutant.__name__ = mechanism_cls.__name__
    return Mutant


@with_mechanism
class ReportsNoLeaves(Mechanism):
    """Frees rows without informing the worker."""

    def release(self, request, *, known_to_worker=True):
        builder = self._state.builder
        leaves = builder._leaves[:]
        super().release(request, known_to_worker=known_to_worker)
        builder._leaves = leaves


@with_mechanism
class OverBudget(Mechanism):
    """Exceeds the token budget of a step by one token."""

    def begin_step(self):
        super().begin_step()
        self._state.draft.tokens_left += 1


class FreesTooEarly(Scheduler):
    """Frees a block of a running request."""

    def schedule(self):
        plan = super().schedule()
        pool = self._state.kv_cache._pool
        for request in self._state.running[:1]:
            pool._free[request.blocks[0][0]] = None
            pool._free.move_to_end(request.blocks[0][0], last=False)
        return plan


@with_mechanism
class LosesPreemptedRequests(Mechanism):
    """Forgets a preempted request, so that it never runs again."""

    def evict(self, request):
        super().evict(request)
        self._host.waiting.discard(request)
        del self._state.requests[request.request_id]


@with_mechanism
class KeepsComputedTokens(Mechanism):
    """Keeps the computed token count of a preempted request."""

    def _take(self, request, *arguments):
        taken = super()._take(request, *arguments)
        if taken and request.num_preemptions and request.num_computed_tokens == 0:
            counts = self._state.draft.counts
            request.num_computed_tokens = min(1, counts[request] - 1)
            counts[request] -= request.num_computed_tokens
        return taken


@with_mechanism
class ReusesRowsEarly(Mechanism):
    """Reuses a row while a step in flight uses it."""

    def release(self, request, *, known_to_worker=True):
        state = self._state
        state.last_step, last_step = -1, state.last_step
        super().release(request, known_to_worker=known_to_worker)
        state.last_step = last_step


@with_mechanism
class DecodesBeyondTheEnd(Mechanism):
    """Continues the decode batch beyond the last token of a request."""

    def _continue_decode_batch(self):
        for request in self._state.running:
            request.max_total_tokens += 1
        done = super()._continue_decode_batch()
        for request in self._state.running:
            request.max_total_tokens -= 1
        return done


@with_mechanism
class AllocatesNoDecodeBlocks(Mechanism):
    """Does not allocate blocks for the decode batch."""

    def _continue_decode_batch(self):
        self._decode_batch.take_full_members = lambda: []
        return super()._continue_decode_batch()


@with_mechanism
class AllocatesUnplannedBlocks(Mechanism):
    """Allocates blocks that no plan contains."""

    def _grow(self, request, num_tokens):
        done = super()._grow(request, num_tokens)
        self._state.draft._grown.clear()
        return done


class IgnoresDecodeStops(Scheduler):
    """Ignores stop tokens in the decode batch."""

    def schedule(self):
        self._state.decode_batch._all_stop_ids = frozenset
        return super().schedule()


class ReturnsTokensOfEndedRequests(Scheduler):
    """Returns tokens of requests that ended during the step."""

    def _finish(self, request, status):
        out, self._in_flight = self._in_flight, ()
        super()._finish(request, status)
        self._in_flight = out


class MixesUpPlans(Scheduler):
    """Assigns a result to the newest plan."""

    def update_from_output(self, plan, output):
        self._in_flight.rotate(len(self._in_flight) - 1)
        outputs = super().update_from_output(plan, output)
        self._in_flight.rotate(1 - len(self._in_flight))
        return outputs


class FinishesTwice(Scheduler):
    """Reports a finished request again with the next result."""

    told = ()

    def update_from_output(self, plan, output):
        outputs = super().update_from_output(plan, output)
        report, self.told = self.told, outputs.finished
        return replace(outputs, finished=report + outputs.finished)


class ReturnsTokensOfAbortedRequests(Scheduler):
    """Continues to return tokens of aborted requests."""

    def abort_requests(self, request_ids):
        return [name for name in request_ids if name in self._requests]


class IgnoresMinTokens(Scheduler):
    """Ignores min_tokens at stop tokens."""

    def add_request(self, request):
        params = replace(request.sampling_params, min_tokens=0)
        super().add_request(replace(request, sampling_params=params))


class IgnoresStops(Scheduler):
    """Ignores `stop_token_ids`."""

    def add_request(self, request):
        super().add_request(replace(request, stop_token_ids=request.stop_token_ids & {0}))


class SharesAcrossSalts(Scheduler):
    """Shares cached prefixes across salts."""

    def add_request(self, request):
        super().add_request(replace(request, cache_salt=""))


@with_mechanism
class RecomputesPrompts(Mechanism):
    """Returns prompt log-probabilities again after a preemption."""

    def evict(self, request):
        request.num_prompt_logprobs = 0
        super().evict(request)


class UsesOtherRandomNumbers(Scheduler):
    """Uses its own random numbers instead of the injected generator."""

    def schedule(self):
        if random.random() < 0.2:
            self._state.decode_batch.remove_all_members()
            self._state.decode_batch.outside.reverse()
        return super().schedule()


class SkipsSteps(Scheduler):
    """Sometimes plans no tokens although a request could run."""

    def schedule(self):
        self.turn = getattr(self, "turn", 0) + 1
        if self.turn % 7:
            return super().schedule()
        plan, record = StepDraft(0).emit(self._state.builder)
        self._state.last_step = plan.step_id
        self._in_flight.append(record)
        return plan


@with_mechanism
class AlwaysChunks(Mechanism):
    """Chunks prompts although chunked prefill is off."""

    def begin_step(self):
        super().begin_step()
        self._chunks = True


class AcceptsAnyLength(Scheduler):
    """Accepts prompts of any length."""

    def add_request(self, request):
        try:
            super().add_request(request)
        except RequestError:
            if request.request_id in self._state.requests:
                raise


class ChangesReturnedPlans(FakeScheduler):
    """Modifies a returned plan."""

    def schedule(self):
        if self._out and self._plan.rows:
            self._plan.starts[0] = 0
            self._plan.starts.append(1)
        self._plan = super().schedule()
        return self._plan


class CountsWaitingAsRunning(FakeScheduler):
    """Counts a waiting request as running, too."""

    def depth(self):
        depth = super().depth()
        return replace(depth, num_running=depth.num_running + depth.num_waiting)


MUTANTS = [
    ReportsNoLeaves,
    OverBudget,
    FreesTooEarly,
    LosesPreemptedRequests,
    KeepsComputedTokens,
    ReusesRowsEarly,
    DecodesBeyondTheEnd,
    AllocatesNoDecodeBlocks,
    AllocatesUnplannedBlocks,
    IgnoresDecodeStops,
    ReturnsTokensOfEndedRequests,
    MixesUpPlans,
    FinishesTwice,
    ReturnsTokensOfAbortedRequests,
    IgnoresMinTokens,
    IgnoresStops,
    SharesAcrossSalts,
    RecomputesPrompts,
    UsesOtherRandomNumbers,
    SkipsSteps,
    AlwaysChunks,
    AcceptsAnyLength,
    ChangesReturnedPlans,
    CountsWaitingAsRunning,
]


@pytest.mark.costly
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_faulty_scheduler_is_detected(mutant):
    with pytest.raises(AssertionError) as actual:
        check_scheduler(mutant)
    expect_rule_first(actual.value)


@pytest.mark.costly
def test_a_prefix_index_without_chained_hashes_is_detected(monkeypatch):
    """Blocks with equal tokens must have different hashes if their prefixes differ."""
    chained = hashing.block_hash
    monkeypatch.setattr(hashing, "block_hash", lambda _, ids, extra: chained(b"", ids, extra))
    with pytest.raises(
        AssertionError,
        match=r"contains other data|whose data is stale|share block|with a different salt",
    ):
        check_scheduler(Scheduler)


def test_a_block_allocated_twice_is_detected(monkeypatch):
    pool_cls = manager.BlockPool
    right = pool_cls.allocate

    def allocate(self, count):
        blocks = right(self, count)
        if blocks and self.num_free > 2:
            self._free[blocks[-1]] = None
            self._free.move_to_end(blocks[-1], last=False)
        return blocks

    monkeypatch.setattr(pool_cls, "allocate", allocate)
    with pytest.raises(AssertionError):
        check_scheduler(Scheduler)
