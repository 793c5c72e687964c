"""The policy suite detects faulty policies: each mutant has one fault."""

import inspect
import itertools
import random

import pytest
from conformance.messages import expect_rule_first

from dovetail.interfaces import CONTINUE, Evict, Hold, Policy, PreemptAndAdmit, Run
from dovetail_devkit.fakes.policy import FakePolicy
from dovetail_devkit.suites.policy import check_policy


class ReadsTheFuture(Policy):
    """Reads the expected result from the state of the suite."""

    static_rank = False

    def rank(self, request, view):
        frame = inspect.currentframe()
        while frame is not None and "variant" not in frame.f_locals:
            frame = frame.f_back
        variant = frame.f_locals["variant"] if frame else 0
        return request.sequence * (-1 if variant == 2 else 1)


class ReadsTokens(Policy):
    """Reads the generated tokens of a request."""

    def victim(self, running, view):
        return min(running, key=lambda request: request.token_ids[-1])


class ReadsTheScheduler(Policy):
    """Accesses the scheduler through the view."""

    def on_arrival(self, request, view):
        self.cache = view._kv_cache


class DeclaresStaticRanks(Policy):
    """Changes its ranks but declares them static."""

    def rank(self, request, view):
        return request.priority * 1_000_000_000 - (view.now_ns - request.arrival_ns)


class RanksByPreemptions(Policy):
    """Changes ranks of waiting requests when other requests are preempted."""

    evicted = 0

    def rank(self, request, view):
        return (request.sequence + self.evicted) % 3

    def on_evict(self, request, num_tokens_lost, view):
        self.evicted += 1


class ChangesPriorities(Policy):
    """Raises the priority of an evicted request."""

    def on_evict(self, request, num_tokens_lost, view):
        request.priority -= 1


class ReturnsAnOldVictim(Policy):
    """Returns the victim of its first call in every later call."""

    seen = None

    def victim(self, running, view):
        self.seen = self.seen or running[0]
        return self.seen


class RandomRanks(Policy):
    """Returns random ranks."""

    static_rank = False

    def rank(self, request, view):
        return random.random()


class MixedRankTypes(Policy):
    """Returns str ranks for some requests and int ranks for others."""

    def rank(self, request, view):
        return str(request.sequence) if request.sequence % 2 else request.sequence


class RanksByCalls(Policy):
    """Returns the number of calls as the rank."""

    calls = itertools.count()

    def rank(self, request, view):
        return -next(self.calls)


class FlagIsNotABool(Policy):
    """Declares a flag that is not a bool."""

    preempts = "sometimes"


class ShortestFirst(Policy):
    """Ranks by the maximum number of tokens, which is allowed."""

    def rank(self, request, view):
        return request.max_total_tokens


class Planning(Policy):
    """A correct policy that overrides `plan`. Each mutant below yields a wrong action."""

    def plan(self, view):
        yield CONTINUE
        for request in view.waiting:
            if not (yield Run(request)):
                return


class RunsTwice(Planning):
    def plan(self, view):
        for request in view.running:
            yield Run(request)
            yield Run(request)
        yield from super().plan(view)


class RunsAHeldRequest(Planning):
    def plan(self, view):
        for request in view.running[1:]:
            yield Hold(request)
            yield Run(request)
        yield from super().plan(view)


class EvictsAWaitingRequest(Planning):
    def plan(self, view):
        for request in view.waiting[:1]:
            yield Evict(request)
        yield from super().plan(view)


class PreemptsForARunningRequest(Planning):
    def plan(self, view):
        for request in view.running[:1]:
            yield PreemptAndAdmit(request)
        yield from super().plan(view)


class EvictsAFinishedRequest(Planning):
    seen = None

    def plan(self, view):
        yield from super().plan(view)
        if self.seen is not None:
            yield Evict(self.seen)
        self.seen = next(iter(view.running), None)


class RunsWithNegativeTokens(Planning):
    def plan(self, view):
        for request in view.running:
            yield Run(request, view.tokens_left - 100)
        yield from super().plan(view)


class YieldsAString(Planning):
    def plan(self, view):
        yield from super().plan(view)
        yield "all the best"


class ReturnsAList(Planning):
    def plan(self, view):
        return [CONTINUE]


class NeverEndsThePlan(Planning):
    def plan(self, view):
        while True:
            yield CONTINUE


class IdlesEveryOtherStep(Planning):
    """Idles in every other step although it declares itself work-conserving."""

    def plan(self, view):
        if view.step_id % 2:
            yield from super().plan(view)


class NeverAdmitsLongPrompts(Planning):
    """A correct policy that never admits long prompts, and declares that it is not
    work-conserving."""

    work_conserving = False

    def plan(self, view):
        yield CONTINUE
        for request in view.waiting:
            if request.num_prompt_tokens < 12:
                yield Run(request)


class ReadsPromptTokens(Planning):
    def plan(self, view):
        yield CONTINUE
        for request in sorted(view.waiting, key=lambda item: item.token_ids[0]):
            yield Run(request)


class RandomOrder(Planning):
    def plan(self, view):
        yield CONTINUE
        for request in sorted(view.waiting, key=lambda item: random.random()):
            yield Run(request)


class SeededOrder(Planning):
    """Uses the engine's random numbers, which is correct."""

    def plan(self, view):
        yield CONTINUE
        for request in sorted(view.waiting, key=lambda item: view.rng.random()):
            yield Run(request)


MUTANTS = [
    RunsTwice,
    RunsAHeldRequest,
    EvictsAWaitingRequest,
    PreemptsForARunningRequest,
    EvictsAFinishedRequest,
    RunsWithNegativeTokens,
    YieldsAString,
    ReturnsAList,
    NeverEndsThePlan,
    IdlesEveryOtherStep,
    NeverAdmitsLongPrompts,
    ReadsPromptTokens,
    RandomOrder,
    ReadsTheFuture,
    ReadsTokens,
    ReadsTheScheduler,
    DeclaresStaticRanks,
    RanksByPreemptions,
    ChangesPriorities,
    ReturnsAnOldVictim,
    RandomRanks,
    MixedRankTypes,
    RanksByCalls,
    FlagIsNotABool,
]


@pytest.mark.costly
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_faulty_policy_is_detected(mutant):
    with pytest.raises(AssertionError) as actual:
        check_policy(mutant)
    expect_rule_first(actual.value)


@pytest.mark.costly
@pytest.mark.sampled(6)
@pytest.mark.parametrize("policy", [ShortestFirst, Planning, SeededOrder])
def test_a_correct_policy_passes(policy):
    check_policy(policy, num_programs=8)


@pytest.mark.costly
def test_a_policy_with_declared_dynamic_ranks_passes():
    honest = type("Honest", (DeclaresStaticRanks,), {"static_rank": False})
    check_policy(honest, num_programs=8)


@pytest.mark.costly
def test_a_policy_is_notified_of_all_events():
    calls = set()

    class Listener(FakePolicy):
        def on_finish(self, request, view):
            super().on_finish(request, view)
            calls.update(hook for hook, _ in self.calls)

    check_policy(Listener, num_programs=8)
    assert calls == {"on_arrival", "on_granted", "on_output", "on_evict", "on_finish"}
