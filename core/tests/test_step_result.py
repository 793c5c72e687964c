from array import array

import pytest

from dovetail.plan import StepBuilder
from dovetail.request import EngineCoreRequest, Request, RequestStatus
from dovetail.result import LogprobColumns, ModelRunnerOutput
from dovetail.sampling_params import SamplingParams
from dovetail.scheduling.decode_batch import DecodeStepRecord
from dovetail.scheduling.draft import StepRecord
from dovetail.scheduling.step_result import process_result


def request(row=0, *, prompt=(1, 2, 3), max_tokens=8, stop=(), **params):
    requested = EngineCoreRequest(
        request_id=f"r{row}",
        prompt_token_ids=tuple(prompt),
        sampling_params=SamplingParams(**params),
        max_tokens=max_tokens,
        stop_token_ids=frozenset(stop),
    )
    new_request = Request(requested, max_model_len=64)
    new_request.row, new_request.status = row, RequestStatus.RUNNING
    new_request.num_cached_tokens = 0
    return new_request


def columns(num_positions, first=0):
    indexes = range(first, first + num_positions)
    return LogprobColumns(
        counts=array("i", [2] * num_positions),
        token_ids=array("i", [token for index in indexes for token in (index, 50)]),
        logprobs=array("f", [-1.0] * (2 * num_positions)),
        ranks=array("i", [1] * num_positions),
    )


def give(requests, sampled, *, starts=None, **more):
    """Process the result of a step that sampled the given tokens for each request."""
    builder = StepBuilder()
    for index, item in enumerate(requests):
        start = starts[index] if starts else 0
        builder.run(item.row, start, 3, samples=bool(sampled[index]))
    plan = builder.build()
    output = ModelRunnerOutput(
        step_id=plan.step_id,
        num_sampled=array("B", map(len, sampled)),
        token_ids=array("i", [token for tokens in sampled for token in tokens]),
        **more,
    )
    return process_result(StepRecord(None, dict.fromkeys(requests, 3)), plan, output)


def test_sampled_tokens_are_assigned_to_requests_in_plan_order():
    first, chunk, second = request(0), request(1), request(2)
    result = give([first, chunk, second], [[7], [], [8]])
    assert result.advanced == [first, second]
    assert list(result.counts) == [1, 1] and list(result.token_ids) == [7, 8]
    assert list(first.token_ids) == [1, 2, 3, 7] and chunk.num_output_tokens == 0
    assert result.ended == []


@pytest.mark.parametrize(
    ("token", "params", "status", "stop_reason"),
    [
        (9, {}, RequestStatus.FINISHED_STOPPED, None),  # 9 is the EOS token
        (
            9,
            {"stop_token_ids": [9]},
            RequestStatus.FINISHED_STOPPED,
            9,
        ),  # 9 is a stop token of the user
        (8, {"stop_token_ids": [9]}, None, None),
    ],
)
def test_a_stop_token_ends_a_request_and_only_user_stop_tokens_are_reported(
    token, params, status, stop_reason
):
    first = request(stop=(9,), **params)
    result = give([first], [[token]])
    assert [how for _, how in result.ended] == ([] if status is None else [status])
    assert first.stop_reason == stop_reason
    assert first.token_ids[-1] == token  # the stop token is part of the output


def test_stop_tokens_are_ignored_before_min_tokens():
    first = request(stop=(9,), min_tokens=3)
    assert give([first], [[9]]).ended == []
    assert give([first], [[9]]).ended == []
    assert give([first], [[9]]).ended == [(first, RequestStatus.FINISHED_STOPPED)]


def test_the_length_limit_ends_a_request_and_a_stop_token_takes_precedence():
    first, second = request(0, max_tokens=1), request(1, max_tokens=1, stop=(9,))
    result = give([first, second], [[7], [9]])
    assert result.ended == [
        (first, RequestStatus.FINISHED_LENGTH_CAPPED),
        (second, RequestStatus.FINISHED_STOPPED),
    ]


def test_tokens_after_the_end_of_a_request_are_dropped():
    first, second = request(0, stop=(9,)), request(1, max_tokens=2)
    result = give([first, second], [[5, 9, 6], [1, 2, 3]])
    assert list(result.counts) == [2, 2]
    assert list(result.token_ids) == [5, 9, 1, 2]
    assert list(first.token_ids) == [1, 2, 3, 5, 9]


def test_results_of_finished_requests_are_dropped():
    ended, alive = request(0, logprobs=1), request(1)
    ended.status = RequestStatus.FINISHED_ABORTED
    result = give([ended, alive], [[5], [6]], logprobs={0: columns(1)})
    assert result.advanced == [alive] and list(result.token_ids) == [6]
    assert result.logprobs == {} and ended.num_output_tokens == 0


def test_cached_tokens_are_reported_once_with_the_first_token():
    first = request()
    first.num_cached_tokens = 2
    assert give([first], [[5]]).num_cached_tokens == {"r0": 2}
    assert give([first], [[5]]).num_cached_tokens == {}


def test_logprobs_of_a_step_are_grouped_by_request():
    first, second = request(0), request(1, logprobs=1)
    own = columns(1)
    result = give([first, second], [[5], [6]], logprobs={1: own})
    assert result.logprobs == {"r1": own}


def test_prompt_logprobs_are_returned_once_across_chunks_and_a_preemption():
    first_request = request(prompt=range(10), prompt_logprobs=1)
    first = give([first_request], [[]], starts=[0], prompt_logprobs={0: columns(4)})
    assert len(first.prompt_logprobs["r0"].counts) == 4
    again = give([first_request], [[]], starts=[0], prompt_logprobs={0: columns(6)})
    assert list(again.prompt_logprobs["r0"].token_ids[::2]) == [4, 5]
    known = give([first_request], [[]], starts=[0], prompt_logprobs={0: columns(6)})
    assert known.prompt_logprobs == {}
    last = give([first_request], [[]], starts=[6], prompt_logprobs={0: columns(3, first=6)})
    assert list(last.prompt_logprobs["r0"].token_ids[::2]) == [6, 7, 8]
    assert first_request.num_prompt_logprobs == 9


def test_outputs_list_finished_requests_with_their_reasons():
    first = request(stop=(9,), stop_token_ids=[9])
    outputs = give([first], [[9]]).outputs(stats=None)
    assert outputs.request_ids == ["r0"] and list(outputs.token_ids) == [9]
    (ended,) = outputs.finished
    assert (ended.request_id, str(ended.reason), ended.stop_reason) == ("r0", "stop", 9)


# --- the decode batch -----------------------------------------------------------


def give_decode_record(requests, sampled, *, ended=(), capped=(), remaining=(), **more):
    """Process the result of a step with a decode batch and with the other requests `remaining`."""
    decode_record = DecodeStepRecord(
        members=requests,
        order=[item.admission for item in requests],
        request_ids=[item.request_id for item in requests],
        token_ids=[item.token_ids for item in requests],
        rows=array("i", [item.row for item in requests]),
        starts=array("i", [3] * len(requests)),
        stop_ids=frozenset().union(*(item.stop_token_ids for item in requests)),
        capped=list(capped),
        gone=dict(ended),
    )
    builder = StepBuilder()
    builder.run_decodes(decode_record.rows, decode_record.starts)
    for item, tokens in remaining:
        builder.run(item.row, 0, 3, samples=bool(tokens))
    plan = builder.build()
    later = [tokens for _, tokens in remaining]
    output = ModelRunnerOutput(
        step_id=plan.step_id,
        num_sampled=array("B", [1] * len(requests) + [*map(len, later)]),
        token_ids=array("i", [*sampled, *(token for tokens in later for token in tokens)]),
        **more,
    )
    record = StepRecord(decode_record, {item: 3 for item, _ in remaining})
    return process_result(record, plan, output)


def decoding(row, **requested):
    new_request = request(row, **requested)
    new_request.token_ids.append(50)
    new_request.admission = row
    return new_request


def test_each_member_of_the_decode_batch_gets_one_token_before_the_other_requests():
    first_request, two, chunk, first = decoding(0), decoding(1), request(2), request(3)
    result = give_decode_record([first_request, two], [7, 8], remaining=[(chunk, []), (first, [9])])
    assert result.request_ids == ["r0", "r1", "r3"] and result.advanced == [
        first_request,
        two,
        first,
    ]
    assert list(result.token_ids) == [7, 8, 9] and list(result.counts) == [1, 1, 1]
    assert list(first_request.token_ids) == [1, 2, 3, 50, 7] and two.token_ids[-1] == 8
    assert result.num_cached_tokens == {"r3": 0}


def test_each_member_of_the_decode_batch_ends_at_its_own_stop_token():
    first, second, third = decoding(0, stop=(8,)), decoding(1, stop=(7,)), decoding(2, max_tokens=2)
    four, five = decoding(3, stop=(7,)), decoding(4, stop=(7,), min_tokens=3)
    result = give_decode_record([first, second, third, four, five], [7] * 5, capped=[third])
    assert result.ended == [
        (second, RequestStatus.FINISHED_STOPPED),
        (third, RequestStatus.FINISHED_LENGTH_CAPPED),
        (four, RequestStatus.FINISHED_STOPPED),
    ]


def test_in_the_decode_batch_a_stop_token_takes_precedence_over_the_length_limit():
    first = decoding(0, max_tokens=2, stop=(9,))
    result = give_decode_record([first], [9], capped=[first])
    assert result.ended == [(first, RequestStatus.FINISHED_STOPPED)]


def test_in_the_decode_batch_finished_requests_get_no_tokens():
    requests = [decoding(row, stop=(7,), max_tokens=2) for row in range(3)]
    requests[1].status = RequestStatus.FINISHED_ABORTED
    result = give_decode_record(requests, [5, 7, 6], ended={1: requests[1]}, capped=requests)
    assert result.request_ids == ["r0", "r2"] and list(result.token_ids) == [5, 6]
    assert requests[1].num_output_tokens == 1
    assert [item for item, _ in result.ended] == [requests[0], requests[2]]


def test_logprobs_are_assigned_to_members_of_the_decode_batch():
    first, second = decoding(0), decoding(1, logprobs=1)
    own = columns(1)
    result = give_decode_record([first, second], [5, 6], logprobs={1: own})
    assert result.logprobs == {"r1": own} and list(result.token_ids) == [5, 6]
