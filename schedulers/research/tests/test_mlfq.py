"""The guarantees of mlfq, and mutants that violate them."""

import pytest

from dovetail.interfaces import Policy
from dovetail_sched_research.mlfq import MLFQPolicy

OPTIONS = {"max_batch": 4, "levels": 5, "quantum": 4, "promote_s": 2.0}


def behind_long_ones(lab, num_long=6):
    """Return long jobs that arrive together, and a short job every 300 ms."""
    long = [lab.Job(name=f"l{n}", prompt=40, output=500) for n in range(num_long)]
    short = [
        lab.Job(name=f"s{n}", prompt=20, output=4, arrival_ns=(1_000 + 300 * n) * lab.MS)
        for n in range(10)
    ]
    return [*long, *short]


def mlfq_a_short_request_overtakes_long_requests(policy, lab):
    game = lab.play(policy, behind_long_ones(lab), seats=16, options=OPTIONS)
    slowest = max(fate.latency_ns for name, fate in game.fates.items() if name.startswith("s"))
    assert slowest < 50 * lab.MS  # the time of four steps, and of the step in flight at the arrival


def mlfq_a_paused_request_is_not_recomputed(policy, lab):
    game = lab.play(policy, behind_long_ones(lab), seats=16, options=OPTIONS)
    assert max(len(step.runs) for step in game.steps) == 4
    assert game.stats.num_preemptions == game.stats.num_recomputed_tokens == 0
    paused = [name for name, fate in game.fates.items() if fate.max_gap_ns > 100 * lab.MS]
    assert paused


def mlfq_long_requests_finish_although_short_requests_keep_arriving(policy, lab):
    long = lab.Job(name="long", prompt=40, output=60)
    stream = [
        lab.Job(name=f"s{n}", prompt=8, output=4, arrival_ns=n * 5 * lab.MS) for n in range(2000)
    ]
    options = {**OPTIONS, "promote_s": 0.2}
    until_ns = 10_000 * lab.MS
    game = lab.play(policy, [long, *stream], seats=64, until_ns=until_ns, options=options)
    assert game["long"].finished


def mlfq_a_long_prompt_starts_on_a_lower_level(policy, lab):
    jobs = [
        lab.Job(name="long", prompt=1000, output=30),
        lab.Job(name="short", prompt=20, output=4, arrival_ns=lab.MS),
    ]
    options = {**OPTIONS, "max_batch": 1}
    game = lab.play(policy, jobs, seats=4, budget=100, options=options)
    assert game["short"].latency_ns < 50 * lab.MS


def mlfq_a_request_moves_one_level_down_after_each_quantum(policy, lab):
    jobs = [lab.Job(name=f"j{n}", output=40) for n in range(2)]
    options = {**OPTIONS, "max_batch": 1}
    game = lab.play(policy, jobs, seats=2, options=options)
    turns = [step.runs[0][0] for step in game.steps]
    lengths, last = [], None
    for name in turns:
        lengths = [*lengths[:-1], lengths[-1] + 1] if name == last else [*lengths, 1]
        last = name
    assert lengths[:6] == [4, 4, 8, 8, 16, 16]


def mlfq_requests_are_preempted_only_with_the_option(policy, lab):
    jobs = behind_long_ones(lab, num_long=4)
    patient = lab.play(policy, jobs, seats=4, options=OPTIONS)
    assert patient.stats.num_preemptions == 0
    eager = lab.play(policy, jobs, seats=4, options={**OPTIONS, "preempt": True})
    assert eager["s0"].latency_ns < patient["s0"].latency_ns / 10
    assert eager.stats.num_recomputed_tokens > 1000  # the cost of preemption


def mlfq_all_requests_finish_if_blocks_run_out(policy, lab):
    jobs = [lab.Job(name=f"j{n}", prompt=100, output=20, arrival_ns=n * lab.MS) for n in range(6)]
    options = {"max_batch": 1, "quantum": 1, "promote_s": 0.01}
    world = {"seats": 2, "blocks": 8, "budget": 16, "until_ns": 6_000 * lab.MS}
    game = lab.play(policy, jobs, options=options, **world)
    assert all(fate.finished for fate in game.fates.values())


class NeverProtects(MLFQPolicy):
    """A mutant that may preempt a request any number of times."""

    def rank(self, request, view):
        return self._places[request.sequence].level, request.sequence


class NeverSinks(MLFQPolicy):
    def on_granted(self, request, num_tokens, view):
        self._places[request.sequence].served_ns = view.now_ns


class NeverRises(MLFQPolicy):
    def __init__(self, options):
        super().__init__({**options, "promote_s": 1e6})


class JoinsAtTheTop(MLFQPolicy):
    def on_arrival(self, request, view):
        super().on_arrival(request, view)
        self._places[request.sequence].level = 0


class EqualQuanta(MLFQPolicy):
    def __init__(self, options):
        super().__init__(options)
        self._quanta = [self._options.quantum] * self._options.levels


class PreemptsWithoutTheOption(MLFQPolicy):
    """A mutant that preempts running requests at admission, without the option."""

    def plan(self, view):
        self.max_batch = float("inf")
        yield from super().plan(view)

    def may_preempt(self, request, running, view):
        return self.rank(request, view) < self.rank(running, view)


class ByArrival(Policy):
    def __init__(self, options=None):
        super().__init__()


MUTANTS = [
    (MLFQPolicy, ByArrival, mlfq_requests_are_preempted_only_with_the_option),
    (MLFQPolicy, NeverSinks, mlfq_a_short_request_overtakes_long_requests),
    (MLFQPolicy, ByArrival, mlfq_a_paused_request_is_not_recomputed),
    (MLFQPolicy, PreemptsWithoutTheOption, mlfq_requests_are_preempted_only_with_the_option),
    (MLFQPolicy, NeverProtects, mlfq_all_requests_finish_if_blocks_run_out),
    (MLFQPolicy, NeverRises, mlfq_long_requests_finish_although_short_requests_keep_arriving),
    (MLFQPolicy, JoinsAtTheTop, mlfq_a_long_prompt_starts_on_a_lower_level),
    (MLFQPolicy, EqualQuanta, mlfq_a_request_moves_one_level_down_after_each_quantum),
]


@pytest.mark.costly
def test_a_policy_keeps_its_guarantees(policy, check, lab):
    check(policy, lab)


@pytest.mark.costly
def test_a_mutant_of_a_policy_violates_its_guarantee(mutant, check, lab):
    with pytest.raises(AssertionError):
        check(mutant, lab)
