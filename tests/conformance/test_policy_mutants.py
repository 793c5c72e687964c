"""The policy suite finds policies that are wrong: each mutant makes one mistake."""

import itertools
import random

import pytest

from dovetail.interfaces import Policy
from dovetail.testing.fake_policy import FakePolicy
from dovetail.testing.policy import check_policy


class Clairvoyant(Policy):
    """Serves the shortest first, as if it knew."""

    def rank(self, request, view):
        return request.max_total_tokens


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


MUTANTS = [
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
def test_a_wrong_policy_is_found(mutant):
    with pytest.raises(AssertionError):
        check_policy(mutant)


def test_an_ageing_policy_that_says_so_is_right():
    honest = type("Honest", (Dishonest,), {"static_rank": False})
    check_policy(honest)


def test_a_policy_hears_of_everything():
    heard = set()

    class Listener(FakePolicy):
        def on_finish(self, request, view):
            super().on_finish(request, view)
            heard.update(hook for hook, _ in self.heard)

    check_policy(Listener)
    assert heard == {"on_arrival", "on_granted", "on_output", "on_evict", "on_finish"}
