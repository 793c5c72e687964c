"""When an engine is restarted, and which requests are rejected after crashes."""

import pytest

from dovetail.clock import ManualClock
from dovetail.engine.supervision.crash_tracker import CrashTracker
from dovetail.engine.supervision.restarts import Restarts
from dovetail.engine.supervision.rules import SupervisionRules
from dovetail.errors import RequestError, UnavailableError, UserError
from dovetail.request import EngineCoreRequest
from dovetail.sampling_params import SamplingParams


def test_the_delay_before_each_restart_grows_until_restarts_stop():
    rules = SupervisionRules(max_restarts=5, first_delay_s=0.5, max_delay_s=3)
    restarts = Restarts(rules, ManualClock())
    assert [restarts.next_delay_s() for _ in range(6)] == [0.5, 1, 2, 3, 3, None]
    assert restarts.num_failures == 6


def test_a_crash_caused_by_a_request_does_not_count_toward_the_restart_limit():
    restarts = Restarts(SupervisionRules(max_restarts=2, first_delay_s=0.5), ManualClock())
    assert [restarts.next_delay_s(is_by_request=True) for _ in range(9)] == [0.5] * 9
    assert (restarts.num_failures, restarts.num_left) == (0, 0)
    assert [restarts.next_delay_s() for _ in range(3)] == [0.5, 1, None]
    never = Restarts(SupervisionRules(max_restarts=0), ManualClock())
    assert never.next_delay_s(is_by_request=True) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_restarts": -1},
        {"max_restarts": 1.5},
        {"max_deaths": 0},
        {"max_silence_s": 0},
        {"window_s": float("inf")},
        {"first_delay_s": "x"},
        {"kill_step_s": True},
        {"max_silence_s": 31, "kill_silence_s": 30},
        {"first_delay_s": 11},
    ],
)
def test_the_error_for_an_invalid_restart_rule_names_it(wrong):
    with pytest.raises(UserError, match=next(iter(wrong))):
        SupervisionRules(**wrong)


def test_crashes_before_the_time_window_do_not_count():
    clock = ManualClock()
    restarts = Restarts(SupervisionRules(max_restarts=1, window_s=60, first_delay_s=1), clock)
    assert restarts.next_delay_s() == 1
    for _ in range(3):
        clock.advance(61_000_000_000)
        assert restarts.next_delay_s() == 1
    clock.advance(59_000_000_000)
    assert restarts.next_delay_s() is None


def request(request_id, prompt=(1, 2, 3), **params):
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        sampling_params=SamplingParams(**params),
        max_tokens=8,
    )


def die(tracker, *requests, restarts_left=9, was_killed=False):
    tracker.restarts_left = restarts_left
    tracker.record_crash([(item.request_id, item) for item in requests], was_killed=was_killed)


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def tracker(clock):
    clock.advance(1)
    return CrashTracker(SupervisionRules(max_deaths=2), clock)


@pytest.mark.parametrize(
    ("again", "parameter"),
    [
        (request("a", (7, 7)), "request_id"),
        (request("other"), "prompt"),
        (request("other", n=2, seed=5), "prompt"),
    ],
    ids=["same id", "same prompt", "another seed"],
)
def test_a_request_is_rejected_if_engines_crashed_while_no_other_request_ran(
    tracker, again, parameter
):
    die(tracker, request("a"))
    tracker.admit("a", request("a"))
    die(tracker, request("a"))
    with pytest.raises(RequestError, match="unfinished at 2 failures of the engine") as rejected:
        tracker.admit(again.request_id, again)
    assert rejected.value.parameter == parameter
    tracker.admit("b", request("b", (9, 9)))
    tracker.admit("b", request("b", temperature=0.5))


def test_a_request_is_blamed_if_it_ran_alone_or_the_engine_works_without_it(tracker, clock):
    crashing, other = ("p", request("p", (6, 6))), ("i", request("i"))
    assert tracker.blames_request([crashing], was_killed=False)
    assert tracker.blames_request([crashing, ("q", request("q", (6, 6)))], was_killed=False)
    assert not tracker.blames_request([crashing], was_killed=True)
    assert not tracker.blames_request([], was_killed=False)
    assert not tracker.blames_request([crashing, other], was_killed=False)
    tracker.record_end(*other, is_normal=True)
    assert tracker.blames_request([crashing, other], was_killed=False)
    assert not tracker.blames_request([crashing, other], was_killed=True)
    assert not tracker.blames_request([], was_killed=False)
    clock.advance(601_000_000_000)
    assert not tracker.blames_request([crashing, other], was_killed=False)


def test_a_prompt_with_changing_parameters_is_rejected_after_one_more_crash(tracker):
    for number in range(3):
        crashing = request(f"p{number}", temperature=0.1 + number / 10)
        tracker.admit(crashing.request_id, crashing)
        die(tracker, crashing)
    with pytest.raises(RequestError, match="its prompt was unfinished at 3 failures"):
        tracker.admit("p", request("p", temperature=0.9))


def test_a_request_that_ran_with_a_crashing_request_is_not_rejected(tracker):
    crashing, other = request("p", (6, 6)), request("i")
    for restarts_left in (4, 3, 2):
        tracker.admit("p", crashing)
        tracker.admit("i", other)
        die(tracker, crashing, other, restarts_left=restarts_left)
    tracker.admit("p", crashing)  # two restarts are left, so one suspected request runs at a time
    with pytest.raises(UnavailableError, match="retry later"):
        tracker.admit("i", other)
    tracker.admit("new", request("new", (5,)))
    die(tracker, crashing, request("new", (5,)), restarts_left=1)
    with pytest.raises(RequestError, match="4 failures"):
        tracker.admit("p", crashing)
    tracker.admit("i", other)
    tracker.record_end("i", other, is_normal=True)
    tracker.admit("new", request("new", (5,)))
    tracker.admit("i2", other)


def test_the_next_suspected_request_runs_after_the_abort_of_a_suspected_request(tracker):
    pair = [request("a"), request("b", (4, 4))]
    for _ in range(2):
        die(tracker, *pair, restarts_left=2)
    tracker.admit("a", pair[0])
    tracker.record_end("a", pair[0], is_normal=False)
    tracker.admit("b", pair[1])
    with pytest.raises(UnavailableError):
        tracker.admit("a", pair[0])


def test_an_external_kill_is_not_blamed_on_a_request_until_few_restarts_are_left(tracker):
    alone = request("a")
    for restarts_left in (4, 3):
        die(tracker, alone, restarts_left=restarts_left, was_killed=True)
        tracker.admit("a", alone)
    die(tracker, alone, restarts_left=2, was_killed=True)
    with pytest.raises(RequestError):
        tracker.admit("a", alone)


def test_requests_with_the_same_prompt_are_not_blamed_until_few_restarts_are_left(tracker):
    crowd = [request(f"{number}") for number in range(4)]
    for restarts_left in (4, 3):
        die(tracker, *crowd, restarts_left=restarts_left)
        for item in crowd:
            tracker.admit(item.request_id, item)
    die(tracker, *crowd, restarts_left=2)
    with pytest.raises(RequestError):
        tracker.admit("x", request("x"))


def test_a_suspected_request_that_finishes_is_no_longer_suspected(tracker):
    die(tracker, request("a"))
    tracker.record_end("a", request("a"), is_normal=True)
    die(tracker, request("a"))
    tracker.admit("a", request("a"))


def test_a_crashing_request_is_rejected_until_the_time_window_ends(tracker, clock):
    for _ in range(2):
        die(tracker, request("a"))
    clock.advance(601_000_000_000)
    tracker.admit("a", request("a"))


def test_crash_records_are_bounded_and_the_latest_are_kept():
    tracker = CrashTracker(SupervisionRules(max_deaths=1), ManualClock())
    for number in range(5000):
        die(tracker, request(f"r{number}", (number,)))
    tracker.admit("r0", request("r0", (0,)))
    with pytest.raises(RequestError):
        tracker.admit("r4999", request("r4999", (4999,)))
