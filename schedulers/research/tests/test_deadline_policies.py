"""The guarantees of on_time, and mutants that violate them.

The jobs are chosen so that the mutants fail.
"""

from itertools import pairwise
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from dovetail_sched_research.edf import EDFPolicy
from dovetail_sched_research.on_time import OnTimePolicy
from dovetail_sched_research.sarathi import SarathiPolicy
from dovetail_sched_research.step_estimate import StepEstimate

STEP_MS = 20


def in_time(game):
    """Return the names of the jobs whose first token was before the deadline."""
    return {
        name
        for name, fate in game.fates.items()
        if fate.token_ns and fate.token_ns[0] <= fate.job.deadline_ns
    }


def learning_jobs(lab):
    """Return early jobs from which the policy learns how long steps take."""
    return [
        lab.Job(name=f"learn{n}", prompt=400, output=6, arrival_ns=n * 100 * lab.MS)
        for n in range(5)
    ]


def on_time_the_request_with_the_most_work_is_late_if_not_all_can_be_on_time(policy, lab):
    start_ns = 1000 * lab.MS
    long = lab.Job(
        name="long", prompt=6000, output=2, arrival_ns=start_ns, deadline_ns=start_ns + 250 * lab.MS
    )
    short = [
        lab.Job(
            name=f"short{n}",
            prompt=900,
            output=2,
            arrival_ns=start_ns,
            deadline_ns=start_ns + 260 * lab.MS,
        )
        for n in range(4)
    ]
    game = lab.play(policy, [*learning_jobs(lab), long, *short])
    assert {job.name for job in short} <= in_time(game)
    assert game["long"].finished


def on_time_requests_that_can_be_on_time_are_served_by_deadline(policy, lab):
    start_ns = 1000 * lab.MS
    jobs = [
        lab.Job(
            name=f"j{n}",
            prompt=1500,
            output=2,
            arrival_ns=start_ns,
            deadline_ns=start_ns + (6 - n) * 100 * lab.MS,
        )
        for n in range(5)
    ]
    game = lab.play(policy, [*learning_jobs(lab), *jobs])
    assert {job.name for job in jobs} <= in_time(game)


def on_time_late_requests_are_served_in_the_order_of_arrival(policy, lab):
    start_ns = 1000 * lab.MS
    late = [
        lab.Job(
            name=f"late{n}",
            prompt=2500 - 100 * n,
            output=2,
            arrival_ns=start_ns,
            deadline_ns=start_ns + 1,
        )
        for n in range(4)
    ]
    game = lab.play(policy, [*learning_jobs(lab), *late])
    firsts = [game[job.name].token_ns[0] for job in late]
    assert firsts == sorted(firsts)


def on_time_the_option_step_ms_limits_the_time_between_tokens(policy, lab):
    decoding = lab.Job(name="decoding", output=150)
    prompts = [
        lab.Job(name=f"j{n}", prompt=3000, output=2, arrival_ns=(200 + n * 100) * lab.MS)
        for n in range(6)
    ]
    warm = lab.Job(name="warm", prompt=400, output=2, arrival_ns=100 * lab.MS)
    options = (
        {"step_ms": STEP_MS} if policy in (OnTimePolicy, KnowsNothing, UsesHalfTheTime) else {}
    )
    game = lab.play(policy, [decoding, warm, *prompts], options=options)
    times = [time_ns for time_ns in game["decoding"].token_ns if time_ns > 190 * lab.MS]
    gaps = [after - before for before, after in pairwise(times)]
    assert max(gaps) <= 1.1 * STEP_MS * lab.MS
    assert max(gaps) >= 0.8 * STEP_MS * lab.MS  # the time is used


def on_time_a_request_without_a_deadline_gets_one(policy, lab):
    start_ns = 1000 * lab.MS
    options = {"ttft_ms": 100} if policy is not EDFPolicy else {}
    jobs = [
        lab.Job(name="none", prompt=1500, output=2, arrival_ns=start_ns),
        lab.Job(
            name="some",
            prompt=1500,
            output=2,
            arrival_ns=start_ns,
            deadline_ns=start_ns + 900 * lab.MS,
        ),
    ]
    game = lab.play(policy, [*learning_jobs(lab), *jobs], options=options)
    assert game["none"].token_ns[0] < game["some"].token_ns[0]


class NeverLate(OnTimePolicy):
    """A mutant that serves all requests by deadline: the long request makes others late."""

    def _order(self, prompts, chunk, view):
        return sorted(prompts, key=lambda item: (self._deadline_ns(item), item.sequence))


class ByArrival(OnTimePolicy):
    def _order(self, prompts, chunk, view):
        return sorted(prompts, key=lambda item: item.sequence)


class ShortestLateFirst(OnTimePolicy):
    def _order(self, prompts, chunk, view):
        return sorted(prompts, key=view.num_uncomputed_tokens)


class KnowsNothing(OnTimePolicy):
    def __init__(self, options=None):
        super().__init__(options)
        self._estimate.learn = lambda running, now_ns: None


class UsesHalfTheTime(OnTimePolicy):
    def __init__(self, options=None):
        super().__init__(options)
        self._step_ns /= 2.5


MUTANTS = [
    (
        OnTimePolicy,
        NeverLate,
        on_time_the_request_with_the_most_work_is_late_if_not_all_can_be_on_time,
    ),
    (
        OnTimePolicy,
        KnowsNothing,
        on_time_the_request_with_the_most_work_is_late_if_not_all_can_be_on_time,
    ),
    (OnTimePolicy, ByArrival, on_time_requests_that_can_be_on_time_are_served_by_deadline),
    (OnTimePolicy, ShortestLateFirst, on_time_late_requests_are_served_in_the_order_of_arrival),
    (OnTimePolicy, KnowsNothing, on_time_the_option_step_ms_limits_the_time_between_tokens),
    (OnTimePolicy, UsesHalfTheTime, on_time_the_option_step_ms_limits_the_time_between_tokens),
    (OnTimePolicy, SarathiPolicy, on_time_the_option_step_ms_limits_the_time_between_tokens),
    (OnTimePolicy, EDFPolicy, on_time_a_request_without_a_deadline_gets_one),
]


def test_a_policy_keeps_its_guarantees(policy, check, lab):
    check(policy, lab)


def test_a_mutant_of_a_policy_violates_its_guarantee(mutant, check, lab):
    with pytest.raises(AssertionError):
        check(mutant, lab)


def test_step_times_are_learned_from_steps_with_and_without_prompts():
    estimate, now_ns = StepEstimate(), 0
    for n in range(400):
        num_tokens = 512 if n % 2 else 3
        estimate.begin(now_ns, num_tokens, {7})
        now_ns += 6_000_000 + num_tokens * 35_000
        estimate.learn([SimpleNamespace(sequence=7)], now_ns)
    assert estimate.decode_ns == pytest.approx(6_000_000, rel=0.02)
    assert estimate.token_ns == pytest.approx(35_000, rel=0.02)
    assert estimate.max_prompt_tokens(20_000_000) == pytest.approx(400, rel=0.02)
    assert estimate.max_prompt_tokens(1_000_000) == 64


def test_idle_time_is_not_learned(lab):
    policies = []

    class Kept(OnTimePolicy):
        def __init__(self, options=None):
            super().__init__(options)
            policies.append(self)

    jobs = [lab.Job(name=f"j{n}", prompt=300, output=3, arrival_ns=n * 10**10) for n in range(6)]
    lab.play(Kept, jobs)
    assert 0 < policies[0]._estimate.decode_ns < 10 * lab.MS


def test_all_requests_finish_without_chunked_prefill(lab):
    jobs = [lab.Job(name="decoding", output=60)]
    jobs += [lab.Job(name=f"j{n}", prompt=900, output=9, arrival_ns=n) for n in range(9)]
    game = lab.play(OnTimePolicy, jobs, chunked=False, options={"step_ms": 8})
    assert all(fate.finished for fate in game.fates.values())


@pytest.mark.parametrize("options", [{"step_ms": 0}, {"ttft_ms": -1}, {"steps": 3}])
def test_invalid_options_are_rejected(options):
    with pytest.raises(ValidationError, match=next(iter(options))):
        OnTimePolicy(options)
