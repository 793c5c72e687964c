"""The suites find schedulers that forget prefixes, and mechanisms that tell policies half."""

from functools import partial

import pytest

from dovetail.kv_cache.block_pool import BlockPool
from dovetail.kv_cache.manager import KVCacheManager
from dovetail.scheduling import Scheduler
from dovetail.testing import policy as policy_suite
from dovetail.testing import policy_programs
from dovetail.testing.fake_policy import AgeingPolicy, FakePolicy
from dovetail.testing.fake_scheduler import FakeScheduler
from dovetail.testing.policy import check_policy
from dovetail.testing.scheduler import check_scheduler
from dovetail_sched_priority import PriorityPolicy

check_prefixes = partial(check_scheduler, num_programs=0, keeps_prefixes=True)


def evict_newest(pool, count):
    for block in reversed(list(pool._free)):
        pool._free.move_to_end(block)
    return allocate(pool, count)


def free_the_beginning_first(pool, blocks):
    free(pool, list(blocks)[::-1])


def commit_prompts_only(manager, request):
    if request.num_computed_tokens <= request.num_prompt_tokens:
        commit(manager, request)


def look_up_without_salt(manager, request):
    request.cache_salt = ""
    return lookup(manager, request)


allocate, free, commit = BlockPool.allocate, BlockPool.free, KVCacheManager.commit
lookup = KVCacheManager.lookup
PREFIX_MISTAKES = {
    "finds nothing": (KVCacheManager, "lookup", lambda manager, request: []),
    "evicts the newest": (BlockPool, "allocate", evict_newest),
    "evicts the beginning first": (BlockPool, "free", free_the_beginning_first),
    "forgets what was generated": (KVCacheManager, "commit", commit_prompts_only),
    "resets nothing": (BlockPool, "reset_cache", lambda pool: True),
    "shares with other tenants": (KVCacheManager, "lookup", look_up_without_salt),
}


@pytest.mark.parametrize("mistake", PREFIX_MISTAKES)
def test_a_wrong_prefix_cache_is_found(mistake, monkeypatch):
    check_prefixes(Scheduler)
    monkeypatch.setattr(*PREFIX_MISTAKES[mistake])
    with pytest.raises(AssertionError):
        check_prefixes(Scheduler)


def test_a_scheduler_need_not_keep_prefixes_but_may_not_claim_to():
    check_scheduler(FakeScheduler, num_programs=0)
    with pytest.raises(AssertionError):
        check_prefixes(FakeScheduler)


class SilentOnGrants(Scheduler):
    """Tells no policy what was granted."""

    def schedule(self):
        self._hears_granted = False
        return super().schedule()


class SilentOnOutput(Scheduler):
    """Tells no policy of tokens."""

    def update_from_output(self, plan, output):
        self._hears_output = False
        return super().update_from_output(plan, output)


class CountsBackwards(Scheduler):
    """Numbers arrivals the wrong way round."""

    def add_request(self, request):
        super().add_request(request)
        self._sequence -= 2


class HidesTheWaiting(Scheduler):
    """Shows policies an empty queue."""

    def __init__(self, context):
        super().__init__(context)
        self.view._waiting = None


class AdmitsOne(Scheduler):
    """Admits one request a step."""

    def _admit(self, request, draft):
        super()._admit(request, draft)
        return False


class NeverDisplaces(Scheduler):
    """Lets nobody give way for a better rank."""

    def _displace(self, request, draft):
        return False


class DisplacesTooMany(Scheduler):
    """Goes on displacing while the row that was given up is still named by a step."""

    def _admit(self, request, draft):
        before = self._num_preemptions
        return super()._admit(request, draft) or self._num_preemptions > before


class DisplacesAnybody(Scheduler):
    """Lets running requests give way, whatever the policy says."""

    def _displace(self, request, draft):
        if not self._running:
            return False
        self._preempt(self._running[-1], draft)
        return True


class TellsTheWrongLoss(Scheduler):
    """Tells a policy that nothing was lost."""

    def _preempt(self, request, draft):
        request.num_computed_tokens = 0
        super()._preempt(request, draft)


MECHANISMS = [
    (SilentOnGrants, FakePolicy),
    (SilentOnOutput, FakePolicy),
    (CountsBackwards, AgeingPolicy),
    (HidesTheWaiting, FakePolicy),
    (AdmitsOne, PriorityPolicy),
    (NeverDisplaces, PriorityPolicy),
    (DisplacesTooMany, PriorityPolicy),
    (DisplacesAnybody, FakePolicy),
    (TellsTheWrongLoss, FakePolicy),
]


@pytest.mark.parametrize(("mechanism", "policy"), MECHANISMS)
def test_a_mechanism_that_tells_a_policy_half_is_found(mechanism, policy, monkeypatch):
    for module in (policy_suite, policy_programs):
        monkeypatch.setattr(module, "Scheduler", mechanism)
    with pytest.raises(AssertionError):
        check_policy(policy)


@pytest.mark.parametrize("policy", [AgeingPolicy, FakePolicy, PriorityPolicy])
def test_a_right_policy_passes(policy):
    check_policy(policy)
