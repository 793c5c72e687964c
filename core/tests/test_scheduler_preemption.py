"""Preemption when blocks or batch slots run out, and the notifications of the policy."""

from typing import ClassVar

import pytest

from dovetail.interfaces import Policy
from dovetail.scheduling import Scheduler


class ByPriority(Policy):
    preempts = True

    def rank(self, request, view):
        return request.priority, request.sequence

    def victim(self, running, view):
        return max(running, key=lambda request: self.rank(request, view))


class ByPriorityNow(ByPriority):
    """The `ByPriority` policy with ranks that are recomputed in each step."""

    static_rank = False


class RecordingPolicy(Policy):
    """A policy that records its notifications in a list, shared by all instances of a test."""

    notified: ClassVar[list] = []

    def on_arrival(self, request, view):
        self.notifications.append(("arrival", request.request_id))

    def on_granted(self, request, num_tokens, view):
        self.notifications.append(("granted", request.request_id, num_tokens))

    def on_output(self, request, num_tokens, view):
        self.notifications.append(("output", request.request_id, num_tokens))

    def on_evict(self, request, num_tokens_lost, view):
        self.notifications.append(("evict", request.request_id, num_tokens_lost))

    def on_finish(self, request, view):
        self.notifications.append(("finish", request.request_id))


def crowded(drive, **limits):
    """Two running requests fill six blocks, and a third request waits."""
    driver = drive(num_blocks=6, max_num_batched_tokens=32, **limits)
    prompts = {name: driver.add(name, 8, max_tokens=9) for name in "ab"}
    driver.step()
    assert driver.running() == ["a", "b"]
    for _ in range(4):
        driver.step()
    prompts["c"] = driver.add("c", 1, max_tokens=2)
    return driver, prompts


def test_the_last_admitted_request_is_preempted_and_no_waiting_request_is_admitted(drive, alone):
    driver, prompts = crowded(drive)
    assert driver.step() == {"a": (12, 1)}
    assert driver.running() == ["a"]
    assert driver.waiting() == ["b", "c"]  # b is first in the queue again
    assert driver.stats.num_preemptions == 1
    assert driver.stats.num_recomputed_tokens == 0  # no token is recomputed yet
    driver.run()
    assert 0 < driver.stats.num_recomputed_tokens < 12  # some of b's blocks were still cached
    assert driver.reasons == dict.fromkeys("abc", "length")
    for name, prompt in prompts.items():
        assert driver.tokens[name] == alone(prompt, len(driver.tokens[name]))
    assert [len(driver.tokens[name]) for name in "abc"] == [9, 9, 2]


def test_a_preempted_request_keeps_its_tokens_and_finds_its_cached_blocks(drive):
    driver, _ = crowded(drive)
    driver.step()
    seen = driver.step()
    while "b" not in seen:
        seen = driver.step()
    first, count = seen["b"]
    assert first + count == 13 and first >= 4  # the run covers the prompt and the generated tokens
    assert len(driver.tokens["b"]) == 6
    assert driver.cached["b"] == 0  # cached tokens are reported at the first admission only


def test_a_request_that_needs_a_block_can_be_the_victim(drive):
    driver = drive(num_blocks=5)
    driver.add("a", 11, max_tokens=9)
    driver.add("b", 8, max_tokens=9)
    assert driver.step() == {"a": (0, 11), "b": (0, 8)}
    assert driver.step() == {"a": (11, 1)}  # b needs a third block and is the last admitted
    assert driver.waiting() == ["b"]
    driver.run()
    assert driver.reasons == {"a": "length", "b": "length"}


def test_the_grant_of_a_victim_is_rolled_back(drive):
    class First(Policy):
        def victim(self, running, view):
            return running[0]

    driver = drive(num_blocks=5, policy=First)
    driver.add("a", 11, max_tokens=9)
    driver.add("b", 8, max_tokens=9)
    driver.step()
    assert driver.step() == {"b": (8, 1)}  # a had a grant before
    driver.run()
    assert driver.reasons == {"a": "length", "b": "length"}


def test_a_request_preempted_during_a_step_waits_for_its_token(drive, alone):
    driver = drive(num_blocks=6, max_num_batched_tokens=32)
    prompts = {name: driver.add(name, 8, max_tokens=9) for name in "ab"}
    driver.run(depth=2)
    for name, prompt in prompts.items():
        assert driver.tokens[name] == alone(prompt, 9)
    assert driver.stats.num_preemptions > 0


def test_an_aborted_victim_is_not_admitted_again(drive):
    driver, _ = crowded(drive)
    driver.step()
    assert driver.waiting() == ["b", "c"]
    assert driver.scheduler.abort_requests(["b"]) == ["b"]
    driver.run()
    assert set(driver.reasons) == {"a", "c"}


def test_a_preempted_request_longer_than_the_budget_is_recomputed_in_chunks(drive, alone):
    driver = drive(num_blocks=6, max_num_batched_tokens=9, enable_chunked_prefill=False)
    prompts = {name: driver.add(name, 8, max_tokens=9) for name in "ab"}
    driver.run()
    assert driver.stats.num_preemptions > 0
    assert driver.tokens == {name: alone(prompt, 9) for name, prompt in prompts.items()}


# --- priority ---------------------------------------------------------------------------------


@pytest.fixture(params=[ByPriority, ByPriorityNow])
def policy(request):
    return request.param


def test_the_request_with_the_lower_priority_number_is_served_first(drive, policy):
    driver = drive(max_num_seqs=1, policy=policy)
    for name, priority in (("c", 5), ("a", -1), ("d", 5), ("b", 0)):
        driver.add(name, 3, max_tokens=1, priority=priority)
    driver.run()
    assert list(driver.reasons) == list("abcd")


def test_a_request_of_lower_priority_is_preempted_for_its_batch_slot(drive, policy, alone):
    driver = drive(max_num_seqs=2, policy=policy)
    prompts = {n: driver.add(n, 3, max_tokens=4, priority=p) for n, p in (("a", 1), ("b", 2))}
    driver.step()
    prompts["vip"] = driver.add("vip", 3, max_tokens=4, priority=0)
    assert driver.step() == {"a": (3, 1), "vip": (0, 3)}
    assert driver.waiting() == ["b"]
    driver.run()
    assert {n: driver.tokens[n] for n in prompts} == {n: alone(p, 4) for n, p in prompts.items()}


def test_a_request_of_lower_priority_is_preempted_for_its_blocks(drive, policy):
    driver = drive(num_blocks=6, policy=policy)
    for name, priority in (("low", 9), ("mid", 5)):
        driver.add(name, 8, max_tokens=3, priority=priority)
    driver.step()
    driver.add("vip", 16, max_tokens=1, priority=0)
    assert driver.step() == {"vip": (0, 16)}
    assert driver.waiting() == ["mid", "low"]
    driver.run()
    assert set(driver.reasons) == {"low", "mid", "vip"}
    assert driver.stats.num_preemptions == 2


class Classes(Policy):
    """A policy with a rank that depends on the priority only."""

    preempts = True

    def rank(self, request, view):
        return request.priority


def test_a_request_that_cannot_fit_preempts_no_request(drive):
    class Counting(ByPriority):
        num_requested = 0

        def victim(self, running, view):
            self.num_requested += 1
            return super().victim(running, view)

    driver = drive(num_blocks=12, policy=Counting)
    driver.add("top", 12, max_tokens=4, priority=0)
    for name in "abc":
        driver.add(name, 2, max_tokens=6, priority=9)
    driver.step()
    # needs 11 of 12 blocks; "top" uses some blocks
    driver.add("large", 40, max_tokens=2, priority=5)
    driver.step()
    assert (driver.scheduler.policy.num_requested, driver.stats.num_preemptions) == (0, 0)
    driver.run()
    assert driver.reasons == dict.fromkeys(["top", "a", "b", "c", "large"], "length")


@pytest.mark.parametrize("policy", [ByPriority, ByPriorityNow, Classes])
def test_requests_of_equal_priority_are_not_preempted(drive, policy):
    driver = drive(max_num_seqs=1, policy=policy)
    driver.add("a", 3, max_tokens=3, priority=1)
    driver.step()
    driver.add("b", 3, max_tokens=3, priority=1)
    assert driver.step() == {"a": (3, 1)}


def test_a_policy_without_victims_preempts_no_running_request(drive):
    class WithoutVictims(ByPriority):
        preempts = False

    driver = drive(max_num_seqs=1, policy=WithoutVictims)
    driver.add("low", 3, max_tokens=3, priority=9)
    driver.step()
    driver.add("vip", 3, max_tokens=3, priority=0)
    assert driver.step() == {"low": (3, 1)}
    assert driver.waiting() == ["vip"]


def test_preempted_requests_are_admitted_again_after_requests_of_higher_priority(drive, policy):
    driver = drive(max_num_seqs=3, policy=policy)
    for name in "abc":
        driver.add(name, 3, max_tokens=6, priority=5)
    driver.step()
    for name in "xyz":
        driver.add(name, 3, max_tokens=2, priority=1)
    assert driver.step().keys() == {"x", "y", "z"}
    driver.run()
    assert set(driver.reasons) == set("abcxyz")


def test_a_step_that_preempts_admits_no_request_even_with_free_blocks(drive):
    class WithoutVictims(ByPriority):
        preempts = False

    driver = drive(num_blocks=6, max_num_seqs=2, policy=WithoutVictims)
    for name in "ab":
        driver.add(name, 8, max_tokens=9, priority=5)
    driver.step()
    driver.add("c", 1, max_tokens=2, priority=0)
    for _ in range(4):
        assert driver.step().keys() == {"a", "b"}
    assert driver.step().keys() == {
        "a"
    }  # b was preempted; its batch slot and blocks stay free in this step
    assert driver.step().keys() == {"a", "c"}


def test_a_request_admitted_and_preempted_in_one_step_is_not_in_the_plan(drive):
    class WaitingFirst(Policy):
        """A policy that serves waiting requests before running requests."""

        static_rank, preempts = False, True

        def rank(self, request, view):
            return any(item is request for item in view.running)

    driver = drive(max_num_seqs=1, policy=WaitingFirst)
    driver.add("a", 5)
    driver.step()
    driver.add("b", 5)
    driver.add("c", 5)
    assert driver.step() == {"c": (0, 5)}
    assert driver.worker.names == {0: "c"}
    assert driver.stats.num_scheduled_tokens == 5


def test_blocks_of_preempted_requests_are_free_after_their_last_step(drive, alone):
    driver = drive(num_blocks=8, policy=ByPriority)
    prompt = driver.add("low", 12, max_tokens=4, priority=9)
    driver.plan()
    driver.add("vip", 20, max_tokens=1, priority=0)
    assert driver.plan() == {}
    assert driver.scheduler.view.num_free_blocks == 4  # low's four blocks are still allocated
    driver.settle()
    assert driver.plan() == {"vip": (0, 20)}
    driver.run(depth=2)
    assert driver.tokens["low"] == alone(prompt, 4)
    assert driver.stats.num_preemptions == 1


@pytest.mark.parametrize("depth", [1, 2])
def test_no_request_waits_for_a_request_of_lower_priority(drive, policy, depth):
    driver = drive(max_num_seqs=2, num_blocks=12, policy=policy)
    priorities = {f"r{index}": (index * 7) % 5 for index in range(12)}
    for name, priority in priorities.items():
        driver.add(name, 5, max_tokens=5, priority=priority)
        driver.plan()
        waiting = [priorities[w] for w in driver.waiting()]
        worst = max((priorities[r] for r in driver.running()), default=-1)
        if depth == 1:
            assert not waiting or worst <= min(waiting)
        if len(driver.out) == depth:
            driver.settle()
    driver.run(depth=depth)
    assert driver.reasons.keys() == priorities.keys()


# --- hooks ------------------------------------------------------------------------------------


@pytest.fixture
def notified():
    RecordingPolicy.notifications = []
    return RecordingPolicy.notifications


def test_a_policy_is_notified_of_all_events_of_a_request(drive, notified):
    driver = drive(policy=RecordingPolicy, max_num_batched_tokens=8)
    driver.add("a", 10, max_tokens=2)
    driver.run()
    assert notified == [
        ("arrival", "a"),
        ("granted", "a", 8),
        ("granted", "a", 2),
        ("output", "a", 1),
        ("granted", "a", 1),
        ("output", "a", 1),
        ("finish", "a"),
    ]


def test_a_policy_is_notified_of_evictions_and_aborts(drive, notified):
    driver, _ = crowded(drive, policy=RecordingPolicy)
    driver.step()
    driver.scheduler.abort_requests(["c"])
    assert ("evict", "b", 12) in notified
    assert notified[-1] == ("finish", "c")


def test_the_policy_in_the_context_overrides_the_policy_of_a_scheduler_subclass(drive, notified):
    class Named(Scheduler):
        policy_cls = RecordingPolicy

    drive(cls=Named).add("a", 3)
    assert notified == [("arrival", "a")]
    drive(cls=Named, policy=ByPriority).add("b", 3)
    assert notified == [("arrival", "a")]


def test_a_policy_can_read_the_scheduler_state_and_the_clock(drive):
    seen = {}

    class RecordsView(Policy):
        def on_granted(self, request, num_tokens, view):
            seen.update(
                now=view.now_ns,
                running=[item.request_id for item in view.running],
                waiting=view.num_waiting,
                free=view.num_free_blocks,
                cached=view.num_cached_tokens(request),
            )

    driver = drive(policy=RecordsView, max_num_seqs=1, num_blocks=10)
    driver.clock.advance(77)
    driver.add("a", 9)
    driver.add("b", 9)
    driver.step()
    assert seen == {"now": 77, "running": ["a"], "waiting": 1, "free": 7, "cached": 8}
