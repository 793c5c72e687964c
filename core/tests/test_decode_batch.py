import weakref
from array import array

import pytest

from dovetail.request import EngineCoreRequest, Request
from dovetail.sampling_params import SamplingParams
from dovetail.scheduling.decode_batch import DecodeBatch


def decoding(row, *, computed=5, max_tokens=9, stop=()):
    """Return a request with a computed prompt and its first token in flight."""
    requested = EngineCoreRequest(
        request_id=f"r{row}",
        prompt_token_ids=tuple(range(computed)),
        sampling_params=SamplingParams(),
        max_tokens=max_tokens,
        stop_token_ids=frozenset(stop),
    )
    new_request = Request(requested, max_model_len=1000)
    new_request.row = row
    new_request.num_computed_tokens, new_request.num_tokens_with_pending = computed, computed + 1
    return new_request


@pytest.fixture
def decode_batch():
    return DecodeBatch(4)


def join(decode_batch, *requests):
    for request in requests:
        decode_batch.admit(request)
    decode_batch.add_members(list(requests))


def step(decode_batch):
    """Run a step. Return the ids of the members with a full block, and the record of the step."""
    due = [request.request_id for request in decode_batch.take_full_members()]
    taken = decode_batch.take_step()
    decode_batch.check_integrity()
    return due, taken


def test_members_of_the_decode_batch_advance_together_and_other_requests_do_not_advance(
    decode_batch,
):
    first, second, separate = decoding(0), decoding(1, computed=9), decoding(2)
    join(decode_batch, first, second)
    decode_batch.admit(separate)
    _, taken = step(decode_batch)
    assert taken.members == [first, second] and taken.request_ids == ["r0", "r1"]
    assert taken.rows == array("i", [0, 1]) and taken.starts == array("i", [5, 9])
    assert (first.num_computed_tokens, first.num_tokens_with_pending) == (6, 7)
    assert (second.num_computed_tokens, separate.num_computed_tokens) == (10, 5)
    assert step(decode_batch)[1].starts == array("i", [6, 10])
    assert taken.starts == array("i", [5, 9])


def test_a_scheduled_step_keeps_its_members_when_the_decode_batch_changes(decode_batch):
    requests = [decoding(row) for row in range(4)]
    join(decode_batch, *requests[:3])
    _, taken = step(decode_batch)
    decode_batch.remove_member(requests[1])
    decode_batch.release(requests[0])
    join(decode_batch, requests[3])
    assert taken.members == requests[:3] and taken.rows == array("i", [0, 1, 2])
    assert step(decode_batch)[1].members == requests[2:]


def test_members_of_the_decode_batch_are_in_admission_order(decode_batch):
    requests = [decoding(row) for row in range(5)]
    for request in requests:
        decode_batch.admit(request)
    decode_batch.add_members(requests[3:4])
    decode_batch.add_members([requests[0], requests[4]])
    decode_batch.add_members([requests[1], requests[2]])
    assert list(decode_batch) == requests == decode_batch.running and decode_batch.outside == []
    decode_batch.remove_member(requests[3])
    decode_batch.remove_member(requests[0])
    assert decode_batch.outside == [requests[0], requests[3]]
    decode_batch.check_integrity()


def test_a_request_that_leaves_the_batch_keeps_its_count_and_can_return(decode_batch):
    first, second = decoding(0), decoding(1)
    join(decode_batch, first, second)
    step(decode_batch)
    decode_batch.remove_member(first)
    step(decode_batch)
    assert (first.num_computed_tokens, second.num_computed_tokens) == (6, 7)
    decode_batch.add_members([first])
    step(decode_batch)
    assert (first.num_computed_tokens, second.num_computed_tokens) == (7, 8)
    decode_batch.remove_all_members()
    decode_batch.check_integrity()
    assert decode_batch.outside == [first, second] and len(decode_batch) == 0
    assert (first.num_computed_tokens, second.num_computed_tokens) == (7, 8)
    decode_batch.add_members([first, second])
    assert step(decode_batch)[1].starts == array("i", [7, 8])


def test_each_step_lists_the_members_whose_last_block_is_full(decode_batch):
    join(
        decode_batch, decoding(0, computed=5, max_tokens=30), decoding(1, computed=8, max_tokens=30)
    )
    due = [step(decode_batch)[0] for _ in range(9)]
    assert due == [["r1"], [], [], ["r0"], ["r1"], [], [], ["r0"], ["r1"]]


@pytest.mark.parametrize("max_tokens", [2, 3, 4, 5])
def test_members_leave_the_decode_batch_after_the_step_of_their_last_token(
    decode_batch, max_tokens
):
    first = decoding(0, max_tokens=max_tokens)
    join(decode_batch, first, decoding(1, max_tokens=40))
    for number in range(1, max_tokens):
        _, taken = step(decode_batch)
        assert taken.capped == ([first] if number == max_tokens - 1 else [])
        assert (first in decode_batch) is (number < max_tokens - 1)
    assert first.num_tokens_with_pending == first.max_total_tokens and decode_batch.outside == [
        first
    ]


def test_events_of_a_request_that_left_and_rejoined_the_batch_count_once(decode_batch):
    # a member is due when its block is full and at its last token
    first = decoding(0, computed=6, max_tokens=4)
    join(decode_batch, first)
    decode_batch.remove_member(first)
    decode_batch.add_members([first])
    assert [step(decode_batch)[0] for _ in range(3)] == [[], [], ["r0"]]
    assert decode_batch.outside == [first]


def test_stop_tokens_are_collected_from_all_members(decode_batch):
    first, second, third = (
        decoding(0, stop=(2, 3)),
        decoding(1, stop=(3, 4)),
        decoding(2, stop=(2, 3)),
    )
    join(decode_batch, first, second, third)
    assert step(decode_batch)[1].stop_ids == {2, 3, 4}
    decode_batch.release(third)
    assert step(decode_batch)[1].stop_ids == {2, 3, 4}
    decode_batch.release(second)
    assert step(decode_batch)[1].stop_ids == {2, 3}


def test_the_index_of_a_decode_batch_member_is_found_by_its_request(decode_batch):
    requests = [decoding(row) for row in range(3)]
    join(decode_batch, *requests)
    taken = decode_batch.take_step()
    decode_batch.release(requests[1])
    assert [taken.place(request) for request in requests] == [0, 1, 2]
    assert taken.place(decoding(7)) == -1
    late = decoding(3)
    decode_batch.admit(late)
    assert taken.place(late) == -1


def test_positions_near_the_32_bit_limit_are_counted_correctly(decode_batch):
    requests = [decoding(row, computed=row + 1, max_tokens=40) for row in range(300)]
    requests[7].num_computed_tokens, requests[7].num_tokens_with_pending = 2**31 - 9, 2**31 - 8
    requests[7].max_total_tokens = 2**31 - 1
    join(decode_batch, *requests)
    for number in range(5):
        starts = step(decode_batch)[1].starts
        assert starts[7] == 2**31 - 9 + number and starts[8] == 9 + number
        assert starts[299] == 300 + number and starts[0] == 1 + number


def test_a_request_that_has_left_the_batch_is_not_referenced_until_its_last_step(decode_batch):
    ended, staying = decoding(0, max_tokens=900), decoding(1, max_tokens=900)
    join(decode_batch, ended, staying)
    step(decode_batch)
    decode_batch.release(ended)
    decode_batch.check_integrity()
    step(decode_batch)  # the record of the step before is dropped
    reference = weakref.ref(ended.sampling_params)
    del ended
    assert reference() is None


def test_the_next_full_block_is_found_after_skipped_steps(decode_batch):
    join(decode_batch, decoding(0, computed=5, max_tokens=90), decoding(1, computed=7))
    assert decode_batch.num_steps_to_full_members == 1  # position 8 of the second request
    decode_batch.take_full_members()
    decode_batch.skip_steps(1)
    assert decode_batch.num_steps_to_full_members == 2  # position 8 of the first request
    decode_batch.end_skipped(1)
    assert list(decode_batch.starts) == [6, 8]
    decode_batch.check_integrity()
