"""The policy suite finds policies that are wrong: each mutant makes one mistake."""

import inspect
import itertools
import random

import pytest
from conformance.messages import expect_rule_first

from dovetail.interfaces import CONTINUE, Evict, Hold, Policy, PreemptAndAdmit, Run
from dovetail_devkit.fakes.policy import FakePolicy
from dovetail_devkit.suites.policy import check_policy


class Clairvoyant(Policy):
    """Knows how things will go: it finds what the suite has decided."""

    static_rank = False

    def rank(self, request, view):
        frame = inspect.currentframe()
        while frame is not None and "world" not in frame.f_locals:
            frame = frame.f_back
        world = frame.f_locals["world"] if frame else 0
        return request.sequence * (-1 if world == 2 else 1)


class ReadsTokens(Policy):
    """Looks at what was generated."""

    def victim(self, running, view):
        return min(running, key=lambda request: request.token_ids[-1])


class LooksIntoTheScheduler(Policy):
    """Reaches through the view."""

    def on_arrival(self, request, view):
        self.cache = view._kv_cache


class Dishonest(Policy):
    """Ages, and says that its ranks never change."""

    def rank(self, request, view):
        return request.priority * 1_000_000_000 - (view.now_ns - request.arrival_ns)


class CountsPreemptionsLate(Policy):
    """Changes the rank of those that wait by what happens to others."""

    evicted = 0

    def rank(self, request, view):
        return (request.sequence + self.evicted) % 3

    def on_evict(self, request, num_tokens_lost, view):
        self.evicted += 1


class Writes(Policy):
    """Raises the priority of whom it evicts."""

    def on_evict(self, request, num_tokens_lost, view):
        request.priority -= 1


class ChoosesTheGone(Policy):
    """Lets one give way that it has seen before."""

    seen = None

    def victim(self, running, view):
        self.seen = self.seen or running[0]
        return self.seen


class Fickle(Policy):
    """Ranks by lot."""

    static_rank = False

    def rank(self, request, view):
        return random.random()


class Unordered(Policy):
    """Ranks by words and numbers."""

    def rank(self, request, view):
        return str(request.sequence) if request.sequence % 2 else request.sequence


class CountsCalls(Policy):
    """Ranks by how often it was asked."""

    calls = itertools.count()

    def rank(self, request, view):
        return -next(self.calls)


class SaysMaybe(Policy):
    """Declares what is neither true nor false."""

    preempts = "sometimes"


class ShortestFirst(Policy):
    """Goes by what the user has allowed at most, which is not a secret."""

    def rank(self, request, view):
        return request.max_total_tokens


class Planning(Policy):
    """Plans step by step; each mutant below actions wrongly."""

    def plan(self, view):
        yield CONTINUE
        for request in view.waiting:
            if not (yield Run(request)):
                return


class GrantsTwice(Planning):
    def plan(self, view):
        for request in view.running:
            yield Run(request)
            yield Run(request)
        yield from super().plan(view)


class ContinuesTheHeld(Planning):
    def plan(self, view):
        for request in view.running[1:]:
            yield Hold(request)
            yield Run(request)
        yield from super().plan(view)


class EvictsTheWaiting(Planning):
    def plan(self, view):
        for request in view.waiting[:1]:
            yield Evict(request)
        yield from super().plan(view)


class DisplacesForTheRunning(Planning):
    def plan(self, view):
        for request in view.running[:1]:
            yield PreemptAndAdmit(request)
        yield from super().plan(view)


class RemembersTheDead(Planning):
    seen = None

    def plan(self, view):
        yield from super().plan(view)
        if self.seen is not None:
            yield Evict(self.seen)
        self.seen = next(iter(view.running), None)


class WishesForFewer(Planning):
    def plan(self, view):
        for request in view.running:
            yield Run(request, view.tokens_left - 100)
        yield from super().plan(view)


class WishesForWords(Planning):
    def plan(self, view):
        yield from super().plan(view)
        yield "all the best"


class PlansAList(Planning):
    def plan(self, view):
        return [CONTINUE]


class PlansForEver(Planning):
    def plan(self, view):
        while True:
            yield CONTINUE


class HoldsAll(Planning):
    """Lets nobody run in every other step, and says that it conserves work."""

    def plan(self, view):
        if view.step_id % 2:
            yield from super().plan(view)


class NeverBegins(Planning):
    """Admits nobody whose prompt is longer than a block, and says that it means to."""

    work_conserving = False

    def plan(self, view):
        yield CONTINUE
        for request in view.waiting:
            if request.num_prompt_tokens < 12:
                yield Run(request)


class ReadsThePromptsOfTheWaiting(Planning):
    def plan(self, view):
        yield CONTINUE
        for request in sorted(view.waiting, key=lambda one: one.token_ids[0]):
            yield Run(request)


class PlansByLot(Planning):
    def plan(self, view):
        yield CONTINUE
        for request in sorted(view.waiting, key=lambda one: random.random()):
            yield Run(request)


class PlansBySeededLot(Planning):
    """The same by the engine's lot: a right policy."""

    def plan(self, view):
        yield CONTINUE
        for request in sorted(view.waiting, key=lambda one: view.rng.random()):
            yield Run(request)


MUTANTS = [
    GrantsTwice,
    ContinuesTheHeld,
    EvictsTheWaiting,
    DisplacesForTheRunning,
    RemembersTheDead,
    WishesForFewer,
    WishesForWords,
    PlansAList,
    PlansForEver,
    HoldsAll,
    NeverBegins,
    ReadsThePromptsOfTheWaiting,
    PlansByLot,
    Clairvoyant,
    ReadsTokens,
    LooksIntoTheScheduler,
    Dishonest,
    CountsPreemptionsLate,
    Writes,
    ChoosesTheGone,
    Fickle,
    Unordered,
    CountsCalls,
    SaysMaybe,
]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_faulty_policy_is_detected(mutant):
    with pytest.raises(AssertionError) as found:
        check_policy(mutant)
    expect_rule_first(found.value)


@pytest.mark.parametrize("policy", [ShortestFirst, Planning, PlansBySeededLot])
def test_a_correct_policy_passes(policy):
    check_policy(policy, num_programs=8)


def test_a_policy_with_declared_dynamic_ranks_passes():
    honest = type("Honest", (Dishonest,), {"static_rank": False})
    check_policy(honest, num_programs=8)


def test_a_policy_is_notified_of_all_events():
    heard = set()

    class Listener(FakePolicy):
        def on_finish(self, request, view):
            super().on_finish(request, view)
            heard.update(hook for hook, _ in self.heard)

    check_policy(Listener, num_programs=8)
    assert heard == {"on_arrival", "on_granted", "on_output", "on_evict", "on_finish"}
