"""The scheduler suite detects faulty handling of drafts, pauses, gates, encoders and loads."""

import pytest

from dovetail.interfaces import PauseScope, Policy
from dovetail.kv_cache.encoder_cache import EncoderCacheManager
from dovetail.kv_cache.manager import KVCacheManager
from dovetail.request import Request
from dovetail.scheduling import Scheduler, scheduler
from dovetail.scheduling.admission_gates import AdmissionGates
from dovetail.scheduling.draft import StepRecord
from dovetail.scheduling.encoder_budget import EncoderBudget
from dovetail.scheduling.held_requests import HeldRequests
from dovetail.scheduling.mechanism import Mechanism
from dovetail.scheduling.remote_loads import RemoteLoads
from dovetail.scheduling.step_result import process_result
from dovetail_devkit.scheduler.playing import play
from dovetail_devkit.scheduler.program import SchedulerDriver
from dovetail_devkit.scheduler.random_programs import random_program

NUM_PROGRAMS = 100


class Urgent(Policy):
    """Preempts the least urgent request, even if it already runs in this step."""

    preempts = True

    def rank(self, request, view):
        return request.priority, request.sequence

    def victim(self, running, view):
        return max(running, key=lambda request: self.rank(request, view))


def play_all():
    for seed in range(NUM_PROGRAMS):
        policy = Urgent if seed % 3 == 2 else None
        program = random_program(seed)
        driver = SchedulerDriver(
            Scheduler, program, policy=policy, after_step=Scheduler.check_integrity
        )
        play(program, driver)


def do_nothing(*args, **kwargs):
    return None


reach = EncoderBudget.reach
evict, preempt = Mechanism.evict, Mechanism.preempt_after_failed_load
enter, add = HeldRequests.enter, RemoteLoads.add


def keep_wrong_drafts_in_flight(request, num_wrong):
    request.num_computed_tokens -= num_wrong


def ask_for_one_draft_more(record, plan, output):
    step_result = process_result(record, plan, output)
    for request in record.counts:
        if request.row >= 0:
            request.num_drafts += 1
    return step_result


def keep_drafts_of_the_evicted(mechanism, request):
    num_drafts = request.num_drafts
    evict(mechanism, request)
    request.num_drafts = num_drafts


def pause_nothing(scheduler, scope):
    scheduler._pause = PauseScope.NEW


def pause_for_good(scheduler):
    scheduler._pause = None


def let_all_pass(held_requests, request, gates, now_ns):
    return enter(held_requests, request, [], now_ns)


def trust_every_load(loads, response):
    return [(request, True) for request, _ in add(loads, response)]


def pin_nothing(kv_cache, blocks):
    """Pin no blocks. `unpin` then frees none."""
    kv_cache.unpin = do_nothing


def preempt_and_keep_what_was_computed(mechanism, request):
    kept = request.num_computed_tokens
    mechanism._state.kv_cache.commit(request)
    preempt(mechanism, request)
    request.num_computed_tokens = kept


MISTAKES = {
    "keeps wrong drafts in flight": (Request, "take_back", keep_wrong_drafts_in_flight),
    "keeps wrong drafts as tokens": (Request, "take_back", do_nothing),
    "requests one draft too many": (scheduler, "process_result", ask_for_one_draft_more),
    "keeps drafts of an evicted request": (Mechanism, "evict", keep_drafts_of_the_evicted),
    "ignores a pause": (Scheduler, "pause", pause_nothing),
    "ignores a resume": (Scheduler, "resume", pause_for_good),
    "ignores the gates": (HeldRequests, "enter", let_all_pass),
    "never opens a gate": (AdmissionGates, "take_ready", lambda gates: []),
    "ignores a failure at a gate": (
        AdmissionGates,
        "take_failed",
        lambda gates, now_ns: [],
    ),
    "does not release held requests after a pause": (
        HeldRequests,
        "reopen",
        lambda held_requests: [],
    ),
    "ignores the encoder budget": (EncoderBudget, "reach", lambda budget, request, start, end: end),
    "encodes for an evicted request": (EncoderBudget, "revoke", do_nothing),
    "never frees encoder content": (EncoderCacheManager, "free_input", do_nothing),
    "keeps encoder content of ended requests": (EncoderBudget, "free", do_nothing),
    "does not report freed encoder content": (
        EncoderCacheManager,
        "take_evicted",
        lambda cache: [],
    ),
    "treats failed loads as done": (RemoteLoads, "add", trust_every_load),
    "keeps results computed on failed loads": (StepRecord, "void", do_nothing),
    "continues after a failed load": (Mechanism, "preempt_after_failed_load", do_nothing),
    "reuses blocks of a failed load": (
        Mechanism,
        "preempt_after_failed_load",
        preempt_and_keep_what_was_computed,
    ),
    "never admits loaded requests": (Mechanism, "assign_loaded", do_nothing),
    "leaks the blocks of a load": (Scheduler, "_drop_load", do_nothing),
    "reuses blocks during a store": (KVCacheManager, "pin", pin_nothing),
}


@pytest.mark.costly
def test_the_correct_scheduler_passes():
    play_all()


@pytest.mark.costly
@pytest.mark.sampled(8)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_faulty_scheduler_is_detected(mistake, monkeypatch):
    monkeypatch.setattr(*MISTAKES[mistake])
    with pytest.raises((AssertionError, ValueError, LookupError)):
        play_all()
