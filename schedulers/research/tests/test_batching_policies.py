"""The guarantees of static, orca, prefill_first and sarathi, and mutants that violate them.

The name of each check starts with its policy. The jobs are chosen so that the mutants fail.
"""

import pytest

from dovetail.interfaces import CONTINUE, Policy, Run
from dovetail_sched_research.orca import OrcaPolicy
from dovetail_sched_research.prefill_first import PrefillFirstPolicy
from dovetail_sched_research.sarathi import SarathiPolicy
from dovetail_sched_research.static import StaticPolicy

TAU = 64


def static_no_request_joins_a_running_batch(policy, lab):
    jobs = [
        lab.Job(name=f"j{n}", output=3 + 7 * (n % 3), arrival_ns=n * 9 * lab.MS) for n in range(20)
    ]
    game = lab.play(policy, jobs, seats=4)
    assert sum(bool(step.joined) for step in game.steps) > 3
    for step in game.steps:
        assert not (step.joined and step.before)


def static_blocks_for_the_longest_output_are_reserved(policy, lab):
    jobs = [lab.Job(name=f"j{n}", prompt=16, output=60, max_tokens=64) for n in range(8)]
    game = lab.play(policy, jobs, seats=8, blocks=13)
    assert game.stats.num_preemptions == 0
    assert max(len(step.runs) for step in game.steps) == 2  # each request reserves five blocks


def orca_a_prompt_within_the_token_budget_is_not_split(policy, lab):
    jobs = [lab.Job(name=f"j{n}", prompt=20 + 17 * (n % 4), output=9) for n in range(16)]
    game = lab.play(policy, jobs, seats=8, budget=100)
    lengths = {job.name: job.prompt for job in jobs}
    prompts = [run for step in game.steps for run in step.prompts()]
    assert len(prompts) == len(jobs)
    assert all((start, tokens) == (0, lengths[name]) for name, start, tokens, _ in prompts)


def orca_no_request_is_preempted(policy, lab):
    jobs = [lab.Job(name=f"j{n}", prompt=16, output=60, max_tokens=64) for n in range(8)]
    game = lab.play(policy, jobs, blocks=13)
    assert game.stats.num_preemptions == 0


def orca_a_request_joins_a_running_batch_at_any_iteration(policy, lab):
    jobs = [lab.Job(name="long", output=50), lab.Job(name="late", output=2, arrival_ns=20 * lab.MS)]
    game = lab.play(policy, jobs, seats=2)
    assert game["late"].done_ns < game["long"].done_ns


def orca_a_prompt_above_the_token_budget_is_split(policy, lab):
    jobs = [lab.Job(name="short", output=5), lab.Job(name="huge", prompt=250, output=2)]
    game = lab.play(policy, jobs, budget=100)
    assert game["huge"].finished and game["huge"].admitted_ns > game["short"].done_ns - 1


def prefill_first_no_step_mixes_prompts_and_decodes(policy, lab):
    jobs = [
        lab.Job(name=f"j{n}", prompt=30, output=12, arrival_ns=n * 11 * lab.MS) for n in range(24)
    ]
    game = lab.play(policy, jobs, seats=6, budget=64)
    assert any(step.decodes() for step in game.steps)
    assert not any(step.prompts() and step.decodes() for step in game.steps)


def prefill_first_a_prompt_waits_only_for_the_step_in_flight(policy, lab):
    jobs = [lab.Job(name=f"j{n}", output=200, arrival_ns=n * 40 * lab.MS) for n in range(8)]
    game = lab.play(policy, jobs)
    assert all(fate.admitted_ns - fate.job.arrival_ns < 10 * lab.MS for fate in game.fates.values())


def prefill_first_a_prompt_above_the_token_budget_is_split(policy, lab):
    jobs = [lab.Job(name="short", output=5), lab.Job(name="huge", prompt=250, output=2)]
    assert lab.play(policy, jobs, budget=100)["huge"].finished


def run_with_long_prompts(policy, lab, **world):
    decodes = [lab.Job(name=f"d{n}", prompt=12, output=120) for n in range(6)]
    prompts = [
        lab.Job(name=f"p{n}", prompt=700, output=3, arrival_ns=(200 + 150 * n) * lab.MS)
        for n in range(4)
    ]
    game = lab.play(policy, [*decodes, *prompts], options={"chunk": TAU}, **world)
    return game, [game[job.name] for job in decodes]


def sarathi_every_step_contains_all_decodes(policy, lab):
    game, _ = run_with_long_prompts(policy, lab)
    start = set()
    for step in game.steps:
        assert start & step.before <= set(step.decodes())
        start |= {name for name, _, _, samples in step.runs if samples}


def sarathi_the_option_chunk_limits_the_time_between_tokens(policy, lab):
    game, fates = run_with_long_prompts(policy, lab)
    maximum = game.world.cost(TAU - len(fates), len(fates))
    assert max(fate.max_gap_ns for fate in fates) == maximum


def sarathi_a_step_with_a_partial_prompt_has_exactly_chunk_tokens(policy, lab):
    game, _ = run_with_long_prompts(policy, lab)
    cut = [step for step in game.steps if any(not samples for *_, samples in step.runs)]
    assert len(cut) > 30
    assert {sum(tokens for _, _, tokens, _ in step.runs) for step in cut} == {TAU}


def sarathi_all_requests_finish_without_chunked_prefill(policy, lab):
    game, _ = run_with_long_prompts(policy, lab, chunked=False)
    assert all(fate.finished for fate in game.fates.values())


class AdmitsAtEveryStep(StaticPolicy):
    def plan(self, view):
        yield CONTINUE
        for request in view.waiting:
            if not (yield Run(request, reserve=request.max_total_tokens)):
                return


class ReservesNoOutput(StaticPolicy):
    def plan(self, view):
        if view.running:
            yield CONTINUE
            return
        for request in view.waiting:
            if not (yield Run(request)):
                return


class SplitsPrompts(OrcaPolicy):
    def _admission(self, request, *, whole):
        return Run(request, reserve=request.max_total_tokens)


class ReservesNothing(OrcaPolicy):
    def _admission(self, request, *, whole):
        return Run(request, whole=whole)


class NeverSplits(OrcaPolicy):
    def _admission(self, request, *, whole):
        return super()._admission(request, whole=True)


class MixesPromptsAndDecodes(PrefillFirstPolicy):
    def plan(self, view):
        waiting = view.waiting
        yield CONTINUE
        for request in waiting:
            if not (yield Run(request, whole=True)):
                return


class DecodesFirst(PrefillFirstPolicy):
    def plan(self, view):
        yield CONTINUE
        if view.running:
            return
        yield from super().plan(view)


class SkipsLongPrompts(PrefillFirstPolicy):
    def plan(self, view):
        num_running = len(view.running)
        for request in view.waiting:
            if not (yield Run(request, whole=True)):
                break
        if len(view.running) == num_running:
            yield CONTINUE


class PromptsFirst(SarathiPolicy):
    def plan(self, view):
        left = self._chunk
        ongoing = [item for item in view.running if view.num_uncomputed_tokens(item) > 1]
        for request in (*ongoing, *view.waiting):
            if left > 0:
                left -= (yield Run(request, left)).num_tokens
        if left > 0:
            yield CONTINUE


class CountsPromptsOnly(SarathiPolicy):
    def plan(self, view):
        left = self._chunk
        ongoing = [item for item in view.running if view.num_uncomputed_tokens(item) > 1]
        for request in view.running:
            if request not in ongoing:
                yield Run(request)
        for request in (*ongoing, *view.waiting):
            if left > 0:
                left -= (yield Run(request, left)).num_tokens


class OnePromptAtATime(SarathiPolicy):
    def plan(self, view):
        left = self._chunk
        ongoing = [item for item in view.running if view.num_uncomputed_tokens(item) > 1]
        for request in view.running:
            if request not in ongoing:
                left -= (yield Run(request)).num_tokens
        for request in [*ongoing, *view.waiting][:1]:
            yield Run(request, max(1, left // 2))


class AlwaysSplits(SarathiPolicy):
    def plan(self, view):
        left = self._chunk
        for request in view.running:
            left -= (yield Run(request)).num_tokens
        for request in view.waiting:
            if left > 0:
                left -= (yield Run(request, left)).num_tokens


class IgnoresTheChunk(Policy):
    def __init__(self, options=None):
        super().__init__()


MUTANTS = [
    (StaticPolicy, AdmitsAtEveryStep, static_no_request_joins_a_running_batch),
    (StaticPolicy, ReservesNoOutput, static_blocks_for_the_longest_output_are_reserved),
    (OrcaPolicy, SplitsPrompts, orca_a_prompt_within_the_token_budget_is_not_split),
    (OrcaPolicy, ReservesNothing, orca_no_request_is_preempted),
    (OrcaPolicy, StaticPolicy, orca_a_request_joins_a_running_batch_at_any_iteration),
    (OrcaPolicy, NeverSplits, orca_a_prompt_above_the_token_budget_is_split),
    (PrefillFirstPolicy, MixesPromptsAndDecodes, prefill_first_no_step_mixes_prompts_and_decodes),
    (PrefillFirstPolicy, DecodesFirst, prefill_first_a_prompt_waits_only_for_the_step_in_flight),
    (PrefillFirstPolicy, SkipsLongPrompts, prefill_first_a_prompt_above_the_token_budget_is_split),
    (SarathiPolicy, PromptsFirst, sarathi_every_step_contains_all_decodes),
    (SarathiPolicy, IgnoresTheChunk, sarathi_the_option_chunk_limits_the_time_between_tokens),
    (SarathiPolicy, CountsPromptsOnly, sarathi_the_option_chunk_limits_the_time_between_tokens),
    (
        SarathiPolicy,
        OnePromptAtATime,
        sarathi_a_step_with_a_partial_prompt_has_exactly_chunk_tokens,
    ),
    (SarathiPolicy, AlwaysSplits, sarathi_all_requests_finish_without_chunked_prefill),
]


def test_a_policy_keeps_its_guarantees(policy, check, lab):
    check(policy, lab)


def test_a_mutant_of_a_policy_violates_its_guarantee(mutant, check, lab):
    with pytest.raises(AssertionError):
        check(mutant, lab)


def test_a_static_batch_stays_open_until_requests_with_the_same_prompt_are_added(lab):
    prompt = [*range(10, 90)]
    jobs = [lab.Job(name=f"j{n}", prompt=prompt, output=200) for n in range(3)]
    game = lab.play(StaticPolicy, jobs, seats=4, budget=100, caching=True)
    joined = [index for index, step in enumerate(game.steps) if step.joined]
    assert joined == [0, 1]
