"""A failing policy raises in strict mode. Otherwise FCFS replaces it and no request is lost."""

import logging
import math

import pytest

from dovetail.errors import PolicyError
from dovetail.interfaces import CONTINUE, Denied, Grant, PauseScope, Policy, PreemptAndAdmit, Run


class Failing(Policy):
    """A policy that raises in the third call of the hook `fails_in`."""

    fails_in = ""
    calls_left = 3

    def _count(self, hook):
        if hook == self.fails_in:
            self.calls_left -= 1
            if not self.calls_left:
                raise RuntimeError(f"no more {hook}")

    def rank(self, request, view):
        self._count("rank")
        # The newest request is first, so a switch to FCFS changes the order.
        return -request.sequence

    def victim(self, running, view):
        self._count("victim")
        return running[0]

    def on_arrival(self, request, view):
        self._count("on_arrival")

    def on_granted(self, request, num_tokens, view):
        self._count("on_granted")

    def on_output(self, request, num_tokens, view):
        self._count("on_output")

    def on_evict(self, request, num_tokens_lost, view):
        self._count("on_evict")

    def on_finish(self, request, view):
        self._count("on_finish")


class FailingPlan(Failing):
    """A policy that raises in `plan` after it has yielded some actions."""

    def plan(self, view):
        yield CONTINUE
        for request in view.waiting:
            yield Run(request)
            self._count("plan")


class ChangingRanks(Failing):
    static_rank = False
    preempts = True


HOOKS = ["rank", "victim", "on_arrival", "on_granted", "on_output", "on_evict", "on_finish"]
CASES = [
    *((Failing, hook) for hook in HOOKS),
    *((ChangingRanks, hook) for hook in HOOKS),
    *((FailingPlan, hook) for hook in [*HOOKS, "plan"]),
]


def failing(cls, hook):
    return type(cls.__name__, (cls,), {"fails_in": hook})


def play(driver, alone, depth):
    """Run requests with preemptions and an abort. Check their tokens and return all plans."""
    prompts, plans = {}, []
    for index in range(12):
        name = f"r{index:02}"
        prompts[name] = driver.add(name, 5 + index % 4, max_tokens=9)
        plans.append(driver.plan())
        if index == 7:
            assert driver.scheduler.abort_requests(["r07"]) == ["r07"]
            del prompts["r07"]
        if len(driver.out) == depth:
            driver.settle()
    driver.run(depth=depth)
    assert driver.reasons.keys() == prompts.keys()
    for name, prompt in prompts.items():
        assert driver.tokens[name] == alone(prompt, 9)
    return plans


@pytest.mark.costly
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("cls", "hook"), CASES)
def test_no_request_is_lost_when_a_policy_fails(drive, alone, caplog, cls, hook, depth):
    driver = drive(policy=failing(cls, hook), num_blocks=8, max_num_seqs=4)
    play(driver, alone, depth)
    assert type(driver.scheduler.policy) is Policy
    assert (driver.stats.policy_failures, driver.stats.policy) == (1, "Policy")
    (message,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert f"no more {hook}" in message.getMessage() and cls.__name__ in message.getMessage()


@pytest.mark.parametrize(("cls", "hook"), CASES)
def test_a_failing_policy_raises_in_strict_mode(drive, alone, cls, hook):
    driver = drive(policy=failing(cls, hook), num_blocks=8, max_num_seqs=4, strict=True)
    with pytest.raises(RuntimeError, match=f"no more {hook}"):
        play(driver, alone, 1)


class RanksByNan(Policy):
    """A policy whose ranks have no order."""

    value: object = math.nan

    def rank(self, request, view):
        return self.value


@pytest.mark.parametrize("static_rank", [True, False])
@pytest.mark.parametrize("value", [math.nan, (1, math.nan)])
def test_a_policy_that_ranks_by_nan_fails(drive, caplog, value, static_rank):
    policy = type("RanksByNan", (RanksByNan,), {"value": value, "static_rank": static_rank})
    driver = drive(policy=policy, strict=True)
    with pytest.raises(PolicyError, match=r"policy RanksByNan returned the rank .*nan.*'a'"):
        driver.add("a", 4)
        driver.step()
    driver = drive(policy=policy)
    driver.add("a", 4)
    driver.run()
    assert driver.reasons.keys() == {"a"} and driver.stats.policy_failures == 1
    (message,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "RanksByNan" in message.getMessage() and "nan" in message.getMessage()


def test_a_policy_that_does_not_fail_is_not_replaced(drive, alone):
    driver = drive(policy=failing(Failing, "nowhere"), num_blocks=8, max_num_seqs=4)
    play(driver, alone, 1)
    assert (driver.stats.policy_failures, driver.stats.policy) == (0, "Failing")


def test_fcfs_plans_the_rest_of_a_step_after_the_policy_fails(drive):
    class Half(Policy):
        """A policy that yields two actions in the second step and then raises."""

        def plan(self, view):
            if view.step_id == 0:
                yield from super().plan(view)
                return
            yield Run(view.running[1])
            yield Run(view.waiting[-1])
            raise RuntimeError("half a plan")

    driver = drive(policy=Half, max_num_seqs=4)
    for name in "ab":
        driver.add(name, 4)
    driver.step()
    for name in "cde":
        driver.add(name, 4)
    assert list(driver.step()) == ["a", "b", "e", "c"]  # "a" continues to decode
    assert driver.waiting() == ["d"]
    driver.run()
    assert driver.reasons.keys() == set("abcde")


class NoGenerator(Policy):
    def plan(self, view):
        return [CONTINUE]


class EndlessPolicy(Policy):
    def plan(self, view):
        while True:
            yield CONTINUE


class Unordered(Policy):
    def rank(self, request, view):
        return str(request.sequence) if request.sequence % 2 else request.sequence


class UnorderedNow(Unordered):
    static_rank = False


class NamesNoVictim(Policy):
    def victim(self, running, view):
        return None


@pytest.mark.parametrize(
    ("cls", "error"),
    [
        (NoGenerator, AttributeError),
        (EndlessPolicy, PolicyError),
        (Unordered, TypeError),
        (UnorderedNow, TypeError),
        (NamesNoVictim, PolicyError),
    ],
)
def test_an_invalid_policy_is_counted_as_a_policy_failure(drive, alone, cls, error):
    driver = drive(policy=cls, num_blocks=8, max_num_seqs=4)
    play(driver, alone, 1)
    assert driver.stats.policy_failures == 1
    driver = drive(policy=cls, num_blocks=8, max_num_seqs=4, strict=True)
    with pytest.raises(error):
        play(driver, alone, 1)


@pytest.mark.parametrize("make_action", [Run, PreemptAndAdmit])
def test_an_action_for_a_paused_request_is_not_granted(drive, make_action):
    """A policy may keep references to requests that the view no longer contains."""
    grants = []

    class Remembers(Policy):
        def __init__(self):
            self.known = []

        def on_arrival(self, request, view):
            self.known.append(request)

        def plan(self, view):
            yield CONTINUE
            for request in self.known:
                if request.num_computed_tokens == 0:
                    grants.append((yield make_action(request)))

    driver = drive(policy=Remembers, strict=True)
    driver.scheduler.pause(PauseScope.NEW)
    driver.add("a", 5)
    assert driver.step() == {} and grants == [Grant(denied=Denied.NOT_READY)]
    driver.scheduler.resume()
    assert driver.step() == {"a": (0, 5)}
