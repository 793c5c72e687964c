"""Requests above the limit are rejected, with retry times spread over the expected service time."""

from collections import Counter
from contextlib import ExitStack

import pytest

from dovetail.clock import ManualClock
from dovetail_server.lifecycle.admission import MAX_RETRY_AFTER_S, Admission
from dovetail_server.protocol.errors import APIError

LIMIT = 4


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def full(clock):
    """Return an admission with as many running requests as its limit allows."""
    admission = Admission(clock)
    with ExitStack() as running:
        for _ in range(LIMIT):
            running.enter_context(admission.enter(LIMIT))
        yield admission


def rejection_of(admission):
    with (
        pytest.raises(APIError, match="queue of the server is full") as caught,
        admission.enter(LIMIT),
    ):
        pass
    assert caught.value.status == 429 and admission.num_running == LIMIT
    return caught.value.retry_after_s


def test_a_request_that_ends_makes_room_for_another_request(clock):
    admission = Admission(clock)
    for _ in range(3):
        with admission.enter(1):
            assert admission.num_running == 1
        assert admission.num_running == 0


def test_rejected_clients_retry_at_the_rate_at_which_requests_finish(full):
    times = [rejection_of(full) for _ in range(10 * LIMIT)]
    assert times == sorted(times) and times[0] == 1 and 9 <= times[-1] <= 11
    assert max(Counter(times).values()) <= LIMIT + 1


def test_clients_whose_retry_time_has_passed_do_not_delay_other_clients(full, clock):
    for _ in range(5 * LIMIT):
        rejection_of(full)
    clock.advance(3_000_000_000)
    assert 2 <= rejection_of(full) <= 4
    clock.advance(60_000_000_000)
    assert rejection_of(full) == 1


def test_the_time_to_retry_follows_the_duration_of_recent_requests(clock):
    admission = Admission(clock)
    for _ in range(100):
        with admission.enter(1):
            clock.advance(8_000_000_000)
    with admission.enter(1), pytest.raises(APIError) as caught, admission.enter(1):
        pass
    assert caught.value.retry_after_s == 8


def test_the_time_to_retry_is_limited(full):
    assert max(rejection_of(full) for _ in range(1000)) == MAX_RETRY_AFTER_S
