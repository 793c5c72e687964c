"""The suites detect faulty prefix caches, and mechanisms that do not notify the policy."""

from functools import partial

import pytest

from dovetail.interfaces import Denied
from dovetail.kv_cache.block_pool import BlockPool
from dovetail.kv_cache.hit import Hit
from dovetail.kv_cache.manager import KVCacheManager
from dovetail.scheduling import Scheduler
from dovetail.scheduling.mechanism import Mechanism
from dovetail.scheduling.policy_driver import PolicyDriver
from dovetail.scheduling.waiting_queue import HeapQueue
from dovetail_devkit.fakes.policy import AgingPolicy, FakePolicy
from dovetail_devkit.fakes.scheduler import FakeScheduler
from dovetail_devkit.policy import programs as policy_programs
from dovetail_devkit.suites import policy as policy_suite
from dovetail_devkit.suites.policy import check_policy
from dovetail_devkit.suites.scheduler import check_scheduler
from dovetail_sched_priority import PriorityPolicy

check_prefixes = partial(check_scheduler, num_programs=0, keeps_prefixes=True)


def evict_newest(pool, count):
    for block in reversed(list(pool._cached)):
        pool._cached.move_to_end(block)
    return allocate(pool, count)


def free_the_beginning_first(pool, blocks):
    free(pool, list(blocks)[::-1])


def commit_prompts_only(manager, request):
    if request.num_computed_tokens <= request.num_prompt_tokens:
        commit(manager, request)


def hash_without_salt(manager, request, maximum):
    request.cache_salt = ""
    return prepare_lookup(manager, request, maximum)


allocate, free, commit = BlockPool.allocate, BlockPool.free, KVCacheManager.commit
prepare_lookup = KVCacheManager.prepare_lookup
PREFIX_MISTAKES = {
    "finds no prefix": (KVCacheManager, "lookup", lambda manager, request: Hit(0, [()])),
    "evicts the newest block": (BlockPool, "allocate", evict_newest),
    "evicts the first blocks first": (BlockPool, "free", free_the_beginning_first),
    "does not cache generated tokens": (KVCacheManager, "commit", commit_prompts_only),
    "does not reset": (BlockPool, "reset_cache", lambda pool: True),
    "ignores the salt": (KVCacheManager, "prepare_lookup", hash_without_salt),
}


@pytest.mark.costly
@pytest.mark.sampled(6)
@pytest.mark.parametrize("mistake", PREFIX_MISTAKES)
def test_the_suite_detects_a_faulty_prefix_cache(mistake, monkeypatch):
    check_prefixes(Scheduler)
    monkeypatch.setattr(*PREFIX_MISTAKES[mistake])
    with pytest.raises(AssertionError):
        check_prefixes(Scheduler)


@pytest.mark.costly
def test_a_scheduler_without_prefix_caching_must_not_declare_it():
    check_scheduler(FakeScheduler, num_programs=0)
    with pytest.raises(AssertionError):
        check_prefixes(FakeScheduler)


class ReportsNoGrants(Scheduler):
    """Does not report grants to the policy."""

    def schedule(self):
        self._host.wants_granted = False
        return super().schedule()


class ReportsNoTokens(Scheduler):
    """Does not report tokens to the policy."""

    def update_from_output(self, plan, output):
        self._host.wants_output = False
        return super().update_from_output(plan, output)


class NumbersArrivalsInReverse(Scheduler):
    """Numbers arrivals in reverse order."""

    def add_request(self, request):
        super().add_request(request)
        self._sequence -= 2


class HidesWaitingRequests(Scheduler):
    """Shows the policy an empty queue instead of the waiting requests."""

    def __init__(self, context):
        super().__init__(context)
        self.view._queue = lambda: HeapQueue(lambda request: 0)


def with_part(name, part_cls):
    """Return a scheduler with one part replaced by `part_cls`."""

    class Mutant(Scheduler):
        __doc__ = part_cls.__doc__

        def __init__(self, context):
            super().__init__(context)
            getattr(self, name).__class__ = part_cls

    Mutant.__name__ = part_cls.__name__
    return Mutant


class AdmitsOneRequest(Mechanism):
    """Admits at most one request per step."""

    def admit_waiting(self):
        request = self._host.peek()
        if request is not None:
            (self.preempt_and_admit if self._host.policy.preempts else self.admit)(request)


class NeverPreempts(Mechanism):
    """Never preempts for a better rank."""

    def _find_victims(self, request, hit, num_tokens):
        return []


class PreemptsTooMany(Mechanism):
    """Preempts more requests while a step in flight still uses the freed row."""

    def preempt_and_admit(self, request, max_tokens=0):
        grant = super().preempt_and_admit(request, max_tokens)
        while grant.denied is Denied.NOT_READY and self._state.running:
            self.evict(self._state.running[-1])
        return grant


class PreemptsWithoutThePolicy(Mechanism):
    """Preempts running requests that the policy did not choose."""

    def admit(self, request, *arguments):
        if not self._state.rows.num_free:
            self.evict(self._state.running[-1])
        return super().admit(request, *arguments)


class PreemptsWithoutNeed(Mechanism):
    """Preempts requests even if the freed blocks are not sufficient."""

    def _find_victims(self, request, hit, num_tokens):
        for victim in self._host.worse_than(request, self._state.running):
            self.evict(victim)
        return super()._find_victims(request, hit, num_tokens)


class ReportsAWrongLoss(Mechanism):
    """Reports to the policy that a preempted request loses no computed tokens."""

    def evict(self, request):
        self._decode_batch.remove_all_members()
        request.num_computed_tokens = 0
        super().evict(request)


class SkipsARunningRequest(PolicyDriver):
    """Skips one running request when the policy continues all of them."""

    def _answer(self, action):
        for request in self._state.running[3:]:
            self._mechanism.hold(request)
        return super()._answer(action)


MECHANISMS = [
    (ReportsNoGrants, FakePolicy),
    (ReportsNoTokens, FakePolicy),
    (NumbersArrivalsInReverse, AgingPolicy),
    (HidesWaitingRequests, FakePolicy),
    (with_part("_mechanism", AdmitsOneRequest), PriorityPolicy),
    (with_part("_mechanism", NeverPreempts), PriorityPolicy),
    (with_part("_mechanism", PreemptsTooMany), PriorityPolicy),
    (with_part("_mechanism", PreemptsWithoutThePolicy), FakePolicy),
    (with_part("_mechanism", PreemptsWithoutNeed), PriorityPolicy),
    (with_part("_mechanism", ReportsAWrongLoss), FakePolicy),
    (with_part("_policy_driver", SkipsARunningRequest), FakePolicy),
]


@pytest.mark.costly
@pytest.mark.parametrize(("mechanism", "policy"), MECHANISMS)
def test_a_mechanism_with_missing_notifications_is_detected(mechanism, policy, monkeypatch):
    for module in (policy_suite, policy_programs):
        monkeypatch.setattr(module, "Scheduler", mechanism)
    with pytest.raises(AssertionError):
        check_policy(policy)


@pytest.mark.costly
def test_a_correct_policy_passes():
    """The other policies of this file are installed plugins, which have their own tests."""
    check_policy(AgingPolicy, num_programs=8)
