"""The scheduler suite finds schedulers that are wrong: each mutant makes one mistake."""

import random
from dataclasses import replace

import pytest

from dovetail.errors import RequestError
from dovetail.kv_cache import manager
from dovetail.kv_cache.hashing import root_hash
from dovetail.scheduling import Scheduler
from dovetail.scheduling.draft import StepDraft
from dovetail.testing.fake_scheduler import FakeScheduler
from dovetail.testing.scheduler import check_scheduler


class ForgetsLeaves(Scheduler):
    """Gives rows up without telling the worker."""

    def _release(self, request, *, known_to_worker=True):
        super()._release(request, known_to_worker=False)


class OverBudget(Scheduler):
    """Takes one token more than the budget."""

    def schedule(self):
        limits, budget = self.limits, self.limits.max_num_batched_tokens
        self.limits = replace(limits, max_num_batched_tokens=budget + 1)
        plan = super().schedule()
        self.limits = limits
        return plan


class FreesTooEarly(Scheduler):
    """Puts a block of a running request back among the free ones."""

    def schedule(self):
        plan = super().schedule()
        pool = self._kv_cache._pool
        for request in self._running[:1]:
            pool._free[request.blocks[0][0]] = None
            pool._free.move_to_end(request.blocks[0][0], last=False)
        return plan


class LosesPreempted(Scheduler):
    """Forgets a request that gives way."""

    def _preempt(self, request, draft):
        super()._preempt(request, draft)
        self._waiting.discard(request)
        del self._requests[request.request_id]


class KeepsComputed(Scheduler):
    """Believes that a preempted request's work is still there."""

    def _admit(self, request, draft):
        granted = super()._admit(request, draft)
        if granted and request.num_preemptions and request.num_computed_tokens == 0:
            request.num_computed_tokens = min(1, draft.counts[-1] - 1)
            draft.counts[-1] -= request.num_computed_tokens
        return granted


class ReusesRowsEarly(Scheduler):
    """Hands a row out while a step that names it is still out."""

    def _release(self, request, *, known_to_worker=True):
        self._last_step, last_step = -1, self._last_step
        super()._release(request, known_to_worker=known_to_worker)
        self._last_step = last_step


class Forgetful(Scheduler):
    """Takes a result for that of the newest plan."""

    def update_from_output(self, plan, output):
        self._in_flight.rotate(len(self._in_flight) - 1)
        outputs = super().update_from_output(plan, output)
        self._in_flight.rotate(1 - len(self._in_flight))
        return outputs


class FinishesTwice(Scheduler):
    """Tells of an end once more with the next result."""

    told = ()

    def update_from_output(self, plan, output):
        outputs = super().update_from_output(plan, output)
        told, self.told = self.told, outputs.finished
        return replace(outputs, finished=told + outputs.finished)


class TellsAborts(Scheduler):
    """Goes on giving tokens to the aborted."""

    def abort_requests(self, request_ids):
        return [name for name in request_ids if name in self._requests]


class IgnoresMinTokens(Scheduler):
    """Lets a stop token end a request before its time."""

    def add_request(self, request):
        params = replace(request.sampling_params, min_tokens=0)
        super().add_request(replace(request, sampling_params=params))


class IgnoresStops(Scheduler):
    """Goes past the user's stop tokens."""

    def add_request(self, request):
        super().add_request(replace(request, stop_token_ids=request.stop_token_ids & {0}))


class SharesAcrossSalts(Scheduler):
    """Finds the cached prefixes of every tenant."""

    def add_request(self, request):
        super().add_request(replace(request, cache_salt=""))


class RecomputesPrompts(Scheduler):
    """Counts a prompt's log-probabilities from the start after a preemption."""

    def _preempt(self, request, draft):
        request.num_prompt_logprobs = 0
        super()._preempt(request, draft)


class Capricious(Scheduler):
    """Draws lots with numbers that nobody has injected."""

    def schedule(self):
        if len(self._running) > 1 and random.random() < 0.2:
            self._running.reverse()
        return super().schedule()


class Idle(Scheduler):
    """Now and then plans nothing though something could run."""

    def schedule(self):
        self.turn = getattr(self, "turn", 0) + 1
        if self.turn % 7:
            return super().schedule()
        draft = StepDraft(0)
        plan = draft.emit(self._builder)
        self._last_step = plan.step_id
        self._in_flight.append([])
        return plan


class CutsWholePrompts(Scheduler):
    """Cuts prompts where that is forbidden."""

    def schedule(self):
        limits, self.limits = self.limits, replace(self.limits, enable_chunked_prefill=True)
        plan = super().schedule()
        self.limits = limits
        return plan


class TakesAnything(Scheduler):
    """Refuses no prompt for its length."""

    def add_request(self, request):
        try:
            super().add_request(request)
        except RequestError:
            if request.request_id in self._requests:
                raise


class Rewrites(FakeScheduler):
    """Writes to a plan that was handed out."""

    def schedule(self):
        if self._out and self._plan.rows:
            self._plan.starts[0] = 0
            self._plan.starts.append(1)
        self._plan = super().schedule()
        return self._plan


class Miscounts(FakeScheduler):
    """Counts a request that waits as running, too."""

    def depth(self):
        depth = super().depth()
        return replace(depth, num_running=depth.num_running + depth.num_waiting)


MUTANTS = [
    ForgetsLeaves,
    OverBudget,
    FreesTooEarly,
    LosesPreempted,
    KeepsComputed,
    ReusesRowsEarly,
    Forgetful,
    FinishesTwice,
    TellsAborts,
    IgnoresMinTokens,
    IgnoresStops,
    SharesAcrossSalts,
    RecomputesPrompts,
    Capricious,
    Idle,
    CutsWholePrompts,
    TakesAnything,
    Rewrites,
    Miscounts,
]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_scheduler_is_found(mutant):
    with pytest.raises(AssertionError) as found:
        check_scheduler(mutant)
    assert str(found.value)


def test_a_prefix_index_without_chains_is_found(monkeypatch):
    """Blocks of equal tokens are not equal: what stands before them counts."""
    chained = manager.block_hash
    monkeypatch.setattr(manager, "block_hash", lambda parent, ids: chained(root_hash(""), ids))
    with pytest.raises(AssertionError, match=r"holds something else|share block|is not its own"):
        check_scheduler(Scheduler)


def test_a_block_handed_out_twice_is_found(monkeypatch):
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
