"""The guarantees of sjf, srpt, hrrn, edf and aging, and mutants that violate them."""

from random import Random

import pytest

from dovetail.interfaces import Policy
from dovetail_sched_research.aging import AgingPolicy
from dovetail_sched_research.edf import EDFPolicy
from dovetail_sched_research.hrrn import HRRNPolicy
from dovetail_sched_research.sjf import SJFPolicy
from dovetail_sched_research.srpt import SRPTPolicy


def batch(lab, num_jobs=30):
    """Return jobs that arrive together and declare their real length. Their `max_tokens` is
    larger."""
    rng = Random(11)
    lengths = [rng.randint(2, 200) for _ in range(num_jobs)]
    return [
        lab.Job(name=f"j{n}", output=length, expected=length, max_tokens=600 - length)
        for n, length in enumerate(lengths)
    ]


def sjf_the_mean_latency_is_optimal(policy, lab):
    jobs = batch(lab)
    game = lab.play(policy, jobs, seats=1)
    services = sorted(game.world.service(job) for job in jobs)
    done = [sum(services[: n + 1]) for n in range(len(services))]
    assert game.mean_ns() == sum(done) / len(done)


def one_long(lab):
    """Return a long job, and short jobs that arrive while it runs."""
    long = lab.Job(name="long", output=400, expected=400)
    short = [
        lab.Job(name=f"s{n}", output=5, expected=5, arrival_ns=(100 + 300 * n) * lab.MS)
        for n in range(6)
    ]
    return [long, *short]


def srpt_the_mean_latency_is_far_below_that_of_sjf(policy, lab):
    jobs = one_long(lab)
    assert (
        lab.play(policy, jobs, seats=1).mean_ns() < lab.play(SJFPolicy, jobs, seats=1).mean_ns() / 3
    )


def srpt_requests_of_equal_length_do_not_preempt_each_other(policy, lab):
    jobs = [
        lab.Job(name=f"j{n}", output=100 - n, expected=100 - n, arrival_ns=n * lab.MS)
        for n in range(9)
    ]
    assert lab.play(policy, jobs, seats=1).stats.num_preemptions == 0


def srpt_a_nearly_finished_request_is_not_preempted(policy, lab):
    jobs = [
        lab.Job(name="old", output=100, expected=100),
        lab.Job(name="new", output=20, expected=20, arrival_ns=580 * lab.MS),
    ]
    game = lab.play(policy, jobs, seats=1)
    assert len([t for t in game["old"].token_ns if t < 580 * lab.MS]) in range(85, 100)
    assert game["old"].done_ns < game["new"].admitted_ns + 1


def srpt_preempted_requests_finish(policy, lab):
    game = lab.play(policy, one_long(lab), seats=1)
    assert game["long"].finished and 0 < game.stats.num_preemptions <= 6
    assert game.stats.num_recomputed_tokens > 0  # the cost of preemption is counted


def endless(lab, num_short=400):
    """Return a long job, and a stream of short jobs that keep the batch slot occupied."""
    stream = [
        lab.Job(name=f"s{n}", output=4, expected=4, arrival_ns=n * 24 * lab.MS)
        for n in range(num_short)
    ]
    return [lab.Job(name="long", output=60, expected=60, arrival_ns=lab.MS), *stream]


def hrrn_no_request_waits_forever(policy, lab):
    game = lab.play(policy, endless(lab), seats=1, until_ns=9_000 * lab.MS)
    assert 0 <= game["long"].admitted_ns < 3_000 * lab.MS


def hrrn_after_equal_waiting_times_shorter_requests_run_first(policy, lab):
    jobs = [lab.Job(name="now", output=50, expected=50)]
    jobs += [
        lab.Job(name=f"w{n}", output=n, expected=n, arrival_ns=lab.MS) for n in (40, 90, 7, 200)
    ]
    game = lab.play(policy, jobs, seats=1)
    order = sorted(game.fates, key=lambda name: game[name].admitted_ns)
    assert order == ["now", "w7", "w40", "w90", "w200"]


def misses(game):
    fates = [fate for fate in game.fates.values() if fate.job.deadline_ns]
    return sum(fate.token_ns[0] > fate.job.deadline_ns for fate in fates)


def edf_all_deadlines_are_met_if_any_order_can_meet_them(policy, lab):
    rng, world, jobs, now_ns = Random(4), lab.World(seats=1), [], 0
    for number in rng.sample(range(40), 40):
        job = lab.Job(name=f"j{number:02}", prompt=20, output=rng.randint(5, 40))
        due_ns = now_ns + world.cost(20, 0)
        jobs.append(lab.Job(name=job.name, prompt=20, output=job.output, deadline_ns=due_ns))
        now_ns += world.service(job)
    game = lab.play(policy, sorted(jobs, key=lambda job: job.name), seats=1)
    assert misses(game) == 0  # any other order misses a deadline


def edf_a_request_with_an_earlier_deadline_preempts_a_request_with_a_later_deadline(policy, lab):
    jobs = [
        lab.Job(name="late", output=300, deadline_ns=9_000 * lab.MS),
        lab.Job(name="early", output=5, arrival_ns=50 * lab.MS, deadline_ns=90 * lab.MS),
    ]
    game = lab.play(policy, jobs, seats=1)
    assert misses(game) == 0 and game.stats.num_preemptions == 1
    patient = lab.play(policy, jobs, seats=1, options={"preempt": False})
    assert patient.stats.num_preemptions == 0


def edf_requests_without_a_deadline_run_last(policy, lab):
    jobs = [lab.Job(name=f"free{n}", output=5) for n in range(3)]
    jobs += [lab.Job(name="due", output=5, deadline_ns=7_000 * lab.MS)]
    game = lab.play(policy, jobs, seats=1)
    assert game["due"].admitted_ns == 0
    assert game["free0"].done_ns < game["free1"].done_ns < game["free2"].done_ns


class LongestFirst(SJFPolicy):
    def rank(self, request, view):
        return -self._predict(request), request.sequence


class OrdersByMaxTokens(SJFPolicy):
    def rank(self, request, view):
        return request.max_total_tokens, request.sequence


class RoundsLengths(SJFPolicy):
    def rank(self, request, view):
        return self._predict(request) // 8, request.sequence


class NeverPreempts(SRPTPolicy):
    def may_preempt(self, request, running, view):
        return False


class PreemptsEqualLengths(SRPTPolicy):
    def may_preempt(self, request, running, view):
        return self.rank(running, view) > self.rank(request, view)


class IgnoresProgress(SRPTPolicy):
    def rank(self, request, view):
        return self._predict(request)


class PreemptsTheShortest(SRPTPolicy):
    def victim(self, running, view):
        return min(running, key=lambda item: self.rank(item, view))

    def may_preempt(self, request, running, view):
        return False


class ByArrival(Policy):
    def __init__(self, options=None):
        super().__init__()


class LatestFirst(EDFPolicy):
    def rank(self, request, view):
        return -request.deadline_ns, request.sequence


class NoDeadlineIsFirst(EDFPolicy):
    def rank(self, request, view):
        return request.deadline_ns, request.sequence


class PreemptIsOff(EDFPolicy):
    def __init__(self, options=None):
        super().__init__({"preempt": False})


class PreemptIsAlwaysOn(EDFPolicy):
    def __init__(self, options=None):
        super().__init__()


MUTANTS = [
    (SJFPolicy, LongestFirst, sjf_the_mean_latency_is_optimal),
    (SJFPolicy, OrdersByMaxTokens, sjf_the_mean_latency_is_optimal),
    (SJFPolicy, RoundsLengths, sjf_the_mean_latency_is_optimal),
    (SRPTPolicy, NeverPreempts, srpt_the_mean_latency_is_far_below_that_of_sjf),
    (SRPTPolicy, PreemptsEqualLengths, srpt_requests_of_equal_length_do_not_preempt_each_other),
    (SRPTPolicy, IgnoresProgress, srpt_a_nearly_finished_request_is_not_preempted),
    (SRPTPolicy, PreemptsTheShortest, srpt_preempted_requests_finish),
    (HRRNPolicy, SJFPolicy, hrrn_no_request_waits_forever),
    (HRRNPolicy, ByArrival, hrrn_after_equal_waiting_times_shorter_requests_run_first),
    (EDFPolicy, LatestFirst, edf_all_deadlines_are_met_if_any_order_can_meet_them),
    (EDFPolicy, ByArrival, edf_all_deadlines_are_met_if_any_order_can_meet_them),
    (
        EDFPolicy,
        PreemptIsOff,
        edf_a_request_with_an_earlier_deadline_preempts_a_request_with_a_later_deadline,
    ),
    (
        EDFPolicy,
        PreemptIsAlwaysOn,
        edf_a_request_with_an_earlier_deadline_preempts_a_request_with_a_later_deadline,
    ),
    (EDFPolicy, NoDeadlineIsFirst, edf_requests_without_a_deadline_run_last),
]


@pytest.mark.costly
def test_a_policy_keeps_its_guarantees(policy, check, lab):
    check(policy, lab)


@pytest.mark.costly
def test_a_mutant_of_a_policy_violates_its_guarantee(mutant, check, lab):
    with pytest.raises(AssertionError):
        check(mutant, lab)


class AgingSJF(AgingPolicy):
    inner_cls = SJFPolicy
    max_wait_s = 1.0


def test_aging_limits_the_wait_of_long_requests_under_sjf(lab):
    game = lab.play(AgingSJF, endless(lab), seats=1, until_ns=9_000 * lab.MS)
    assert 1_000 * lab.MS < game["long"].admitted_ns < 2_000 * lab.MS
    starved = lab.play(SJFPolicy, endless(lab), seats=1, until_ns=9_000 * lab.MS)
    assert starved["long"].admitted_ns < 0


def test_aging_does_not_change_the_order_of_young_requests(lab):
    jobs = [lab.Job(name=f"j{n}", output=n, expected=n) for n in (9, 5, 7, 2, 8)]
    games = [lab.play(policy, jobs, seats=1) for policy in (AgingSJF, SJFPolicy)]
    assert games[0].steps == games[1].steps
