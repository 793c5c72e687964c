from array import array

import pytest

from dovetail.request import EngineCoreRequest, Request
from dovetail.sampling_params import SamplingParams
from dovetail.scheduling.cohort import Cohort


def decoding(row, *, computed=5, max_tokens=9, stop=()):
    """A request whose prompt is computed and whose first token is on its way."""
    asked = EngineCoreRequest(
        request_id=f"r{row}",
        prompt_token_ids=tuple(range(computed)),
        sampling_params=SamplingParams(),
        max_tokens=max_tokens,
        stop_token_ids=frozenset(stop),
    )
    made = Request(asked, max_model_len=1000)
    made.row = row
    made.num_computed_tokens, made.num_tokens_with_pending = computed, computed + 1
    return made


@pytest.fixture
def cohort():
    return Cohort(4)


def join(cohort, *requests):
    for request in requests:
        cohort.admit(request)
    cohort.step_in(list(requests))


def step(cohort):
    """A step; return who was due, and what they did."""
    due = [request.request_id for request in cohort.take_due()]
    taken = cohort.take_step()
    cohort.check_integrity()
    return due, taken


def test_members_move_together_and_the_others_stay(cohort):
    one, two, apart = decoding(0), decoding(1, computed=9), decoding(2)
    join(cohort, one, two)
    cohort.admit(apart)
    _, taken = step(cohort)
    assert taken.members == [one, two] and taken.request_ids == ["r0", "r1"]
    assert taken.rows == array("i", [0, 1]) and taken.starts == array("i", [5, 9])
    assert (one.num_computed_tokens, one.num_tokens_with_pending) == (6, 7)
    assert (two.num_computed_tokens, apart.num_computed_tokens) == (10, 5)
    assert step(cohort)[1].starts == array("i", [6, 10])
    assert taken.starts == array("i", [5, 9])


def test_what_a_step_was_given_does_not_change(cohort):
    requests = [decoding(row) for row in range(4)]
    join(cohort, *requests[:3])
    _, taken = step(cohort)
    cohort.step_out(requests[1])
    cohort.release(requests[0])
    join(cohort, requests[3])
    assert taken.members == requests[:3] and taken.rows == array("i", [0, 1, 2])
    assert step(cohort)[1].members == requests[2:]


def test_the_order_is_that_of_admission_whoever_steps_in_when(cohort):
    requests = [decoding(row) for row in range(5)]
    for request in requests:
        cohort.admit(request)
    cohort.step_in(requests[3:4])
    cohort.step_in([requests[0], requests[4]])
    cohort.step_in([requests[1], requests[2]])
    assert list(cohort) == requests == cohort.running and cohort.apart == []
    cohort.step_out(requests[3])
    cohort.step_out(requests[0])
    assert cohort.apart == [requests[0], requests[3]]
    cohort.check_integrity()


def test_who_steps_out_keeps_its_count_and_may_come_back(cohort):
    one, two = decoding(0), decoding(1)
    join(cohort, one, two)
    step(cohort)
    cohort.step_out(one)
    step(cohort)
    assert (one.num_computed_tokens, two.num_computed_tokens) == (6, 7)
    cohort.step_in([one])
    step(cohort)
    assert (one.num_computed_tokens, two.num_computed_tokens) == (7, 8)
    cohort.dissolve()
    cohort.check_integrity()
    assert cohort.apart == [one, two] and len(cohort) == 0
    assert (one.num_computed_tokens, two.num_computed_tokens) == (7, 8)
    cohort.step_in([one, two])
    assert step(cohort)[1].starts == array("i", [7, 8])


def test_members_are_due_when_their_last_block_is_full(cohort):
    join(cohort, decoding(0, computed=5, max_tokens=30), decoding(1, computed=8, max_tokens=30))
    due = [step(cohort)[0] for _ in range(9)]
    assert due == [["r1"], [], [], ["r0"], ["r1"], [], [], ["r0"], ["r1"]]


@pytest.mark.parametrize("max_tokens", [2, 3, 4, 5])
def test_members_step_out_after_the_step_that_gives_their_last_token(cohort, max_tokens):
    one = decoding(0, max_tokens=max_tokens)
    join(cohort, one, decoding(1, max_tokens=40))
    for number in range(1, max_tokens):
        _, taken = step(cohort)
        assert taken.capped == ([one] if number == max_tokens - 1 else [])
        assert (one in cohort) is (number < max_tokens - 1)
    assert one.num_tokens_with_pending == one.max_total_tokens and cohort.apart == [one]


def test_events_of_those_that_left_and_came_back_count_once(cohort):
    one = decoding(0, computed=6, max_tokens=4)  # due when its block is full, and then at its end
    join(cohort, one)
    cohort.step_out(one)
    cohort.step_in([one])
    assert [step(cohort)[0] for _ in range(3)] == [[], [], ["r0"]]
    assert cohort.apart == [one]


def test_stop_tokens_are_those_of_all_members(cohort):
    one, two, three = decoding(0, stop=(2, 3)), decoding(1, stop=(3, 4)), decoding(2, stop=(2, 3))
    join(cohort, one, two, three)
    assert step(cohort)[1].stop_ids == {2, 3, 4}
    cohort.release(three)
    assert step(cohort)[1].stop_ids == {2, 3, 4}
    cohort.release(two)
    assert step(cohort)[1].stop_ids == {2, 3}


def test_places_are_found_by_request(cohort):
    requests = [decoding(row) for row in range(3)]
    join(cohort, *requests)
    taken = cohort.take_step()
    cohort.release(requests[1])
    assert [taken.place(request) for request in requests] == [0, 1, 2]
    assert taken.place(decoding(7)) == -1
    late = decoding(3)
    cohort.admit(late)
    assert taken.place(late) == -1


def test_long_columns_count_right(cohort):
    requests = [decoding(row, computed=row + 1, max_tokens=40) for row in range(300)]
    requests[7].num_computed_tokens, requests[7].num_tokens_with_pending = 2**31 - 9, 2**31 - 8
    requests[7].max_total_tokens = 2**31 - 1
    join(cohort, *requests)
    for number in range(5):
        starts = step(cohort)[1].starts
        assert starts[7] == 2**31 - 9 + number and starts[8] == 9 + number
        assert starts[299] == 300 + number and starts[0] == 1 + number
