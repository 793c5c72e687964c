import dataclasses
from array import array

import pytest

from dovetail.plan import NewRequest, StepBuilder
from dovetail.request import EngineCoreRequest, Request
from dovetail.result import LogprobColumns
from dovetail.sampling_params import SamplingParams


def request(**changes):
    fields = {
        "request_id": "a",
        "prompt_token_ids": [5, 6, 7],
        "sampling_params": SamplingParams(),
        "max_tokens": 4,
        "stop_token_ids": frozenset({2}),
        "bad_words_token_ids": ((8, 9),),
        "seed": 11,
    }
    return Request(EngineCoreRequest(**{**fields, **changes}), max_model_len=64)


def joining(row=3, generation=1):
    new_request = request()
    new_request.row, new_request.generation = row, generation
    return NewRequest.of(new_request)


def test_plan_columns_are_in_the_order_of_the_scheduled_requests():
    builder = StepBuilder()
    builder.leave(9)
    builder.join(joining())
    builder.run(3, 0, 3, samples=True)
    builder.run(1, 17, 1, samples=False)
    plan = builder.build()
    assert list(zip(plan.rows, plan.starts, plan.num_tokens, plan.samples, strict=True)) == [
        (3, 0, 3, 1),
        (1, 17, 1, 0),
    ]
    assert (plan.num_requests, plan.total_num_tokens, plan.empty) == (2, 4, False)
    assert list(plan.leaves) == [9]
    assert [join.row for join in plan.joins] == [3]


def test_plan_columns_have_the_types_of_the_contract():
    builder = StepBuilder(num_groups=2)
    builder.run(0, 0, 1, samples=True)
    builder.grow(0, [4], group=1)
    plan = builder.build()
    columns = (plan.rows, plan.starts, plan.num_tokens, plan.leaves)
    assert [column.typecode for column in columns] == ["i"] * 4
    assert plan.samples.typecode == "B"
    blocks = [c for b in plan.blocks for c in (b.rows, b.counts, b.block_ids)]
    assert [column.typecode for column in blocks] == ["i"] * 6
    assert array("i").itemsize == 4


def test_calling_run_many_gives_the_same_plan_as_calling_run():
    first, many = StepBuilder(), StepBuilder()
    for row in range(5):
        first.run(row, row * 2, 1, samples=row % 2 == 0)
    many.run_many(range(5), range(0, 10, 2), [1] * 5, [1, 0, 1, 0, 1])
    assert first.build() == many.build()


def test_a_plan_keeps_the_blocks_of_each_group_in_order():
    builder = StepBuilder(num_groups=2)
    builder.grow(4, [10, 11])
    builder.grow(5, [])
    builder.grow(4, [12])
    builder.grow(4, [7], group=1)
    first, second = builder.build().blocks
    assert (list(first.rows), list(first.counts)) == ([4, 4], [2, 1])
    assert list(first.block_ids) == [10, 11, 12]
    assert (list(second.rows), list(second.block_ids)) == ([4], [7])


def test_a_plan_builder_numbers_its_plans_and_starts_each_plan_empty():
    builder = StepBuilder()
    builder.leave(1)
    builder.join(joining())
    builder.grow(3, [1])
    builder.run(3, 0, 3, samples=True)
    first, second = builder.build(), builder.build()
    assert (first.step_id, second.step_id) == (0, 1)
    assert second.empty
    assert not second.joins
    assert not second.leaves
    assert not second.blocks[0].rows
    assert list(first.rows) == [3], "the first plan must not change"


def test_a_plan_without_scheduled_requests_can_release_rows():
    builder = StepBuilder()
    builder.leave(2)
    plan = builder.build()
    assert plan.empty
    assert list(plan.leaves) == [2]


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([(0, 0, 1), (0, 1, 1)], "only once"),
        ([(0, 0, 0)], "at least one token"),
        ([(0, -1, 2)], "start ≥ 0"),
    ],
)
def test_an_invalid_plan_is_rejected(runs, message):
    builder = StepBuilder()
    for row, start, num_tokens in runs:
        builder.run(row, start, num_tokens, samples=True)
    with pytest.raises(ValueError, match=message):
        builder.build()


def test_plan_columns_of_unequal_length_are_rejected():
    builder = StepBuilder()
    builder.run_many([0, 1], [0, 0], [1], [1, 1])
    with pytest.raises(ValueError, match="equal lengths"):
        builder.build()


def test_a_plan_is_frozen():
    plan = StepBuilder().build()
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.step_id = 3


def test_a_plan_contains_a_copy_of_the_tokens_of_a_new_request():
    new_request = request()
    new_request.row, new_request.generation = 2, 4
    new_request.token_ids.append(99)
    join = NewRequest.of(new_request)
    new_request.token_ids.append(100)
    assert list(join.token_ids) == [5, 6, 7, 99]
    assert (join.row, join.generation, join.num_prompt_tokens) == (2, 4, 3)
    assert (join.seed, join.stop_token_ids) == (11, frozenset({2}))
    assert join.bad_words_token_ids == ((8, 9),)


def test_the_summary_of_a_plan_contains_shapes_but_no_tokens():
    builder = StepBuilder()
    builder.join(dataclasses.replace(joining(), token_ids=array("i", [424242])))
    builder.run(3, 8, 3, samples=True)
    text = builder.build().describe()
    assert "1 scheduled requests with 3 tokens, 1 new requests, 0 released batch slots" in text
    assert "row 3: positions 8..10" in text
    assert "424242" not in text


def test_the_summary_of_a_plan_with_many_requests_is_short():
    builder = StepBuilder()
    builder.run_many(range(1000), [0] * 1000, [1] * 1000, [1] * 1000)
    assert len(builder.build().describe().splitlines()) == 17


@pytest.mark.parametrize(("max_tokens", "total"), [(4, 7), (1000, 64)])
def test_a_request_ends_at_max_tokens_or_max_model_len(max_tokens, total):
    assert request(max_tokens=max_tokens).max_total_tokens == total


def test_a_plan_has_draft_counts_for_every_request_or_for_no_request():
    builder = StepBuilder()
    builder.run(0, 3, 1, samples=True)
    assert not builder.build().num_drafts
    builder.run(0, 0, 3, samples=False)
    builder.run(1, 5, 3, samples=True, num_drafts=2)
    builder.run_many([2, 3], [0, 9], [4, 2], [0, 1])
    builder.run_many([4], [7], [2], [1], [1])
    builder.run(5, 0, 1, samples=True)
    plan = builder.build()
    assert list(plan.num_drafts) == [0, 2, 0, 0, 1, 0]
    assert plan.num_drafts.typecode == "i"
    assert not builder.build().num_drafts


@pytest.mark.parametrize(
    ("count", "samples", "drafts"), [(2, False, 1), (2, True, 2), (2, True, -1)]
)
def test_drafts_that_cannot_be_verified_are_rejected(count, samples, drafts):
    builder = StepBuilder()
    builder.run(0, 4, count, samples=samples, num_drafts=drafts)
    with pytest.raises(ValueError, match="drafts"):
        builder.build()


def test_encoder_inputs_and_transfers_are_sent_with_one_plan():
    builder = StepBuilder()
    builder.encode(2, 1)
    builder.free_encoded(b"x")
    builder.transfer(b"load")
    plan = builder.build()
    assert [(run.row, run.index) for run in plan.encoder] == [(2, 1)]
    assert (plan.encoder_frees, plan.kv_transfer) == ((b"x",), b"load")
    after = builder.build()
    assert (after.encoder, after.encoder_frees, after.kv_transfer) == ((), (), b"")


def test_log_probabilities_can_be_sliced_at_both_ends():
    columns = LogprobColumns(
        counts=array("i", [2, 1, 2]),
        token_ids=array("i", [1, 10, 2, 3, 30]),
        logprobs=array("f", [-1.0, -2.0, -3.0, -4.0, -5.0]),
        ranks=array("i", [1, 2, 3]),
    )
    first, rest = columns.first(2), columns.after(2)
    assert list(first.token_ids) == [1, 10, 2] and list(first.ranks) == [1, 2]
    assert list(first.logprobs) == [-1.0, -2.0, -3.0] and list(first.counts) == [2, 1]
    assert list(rest.token_ids) == [3, 30] and list(rest.counts) == [2]
    assert not columns.first(0).token_ids


def test_decodes_are_first_in_a_plan_and_sample_one_token_each():
    builder, other = StepBuilder(), StepBuilder()
    builder.run_decodes(array("i", [4, 2]), array("i", [17, 3]))
    builder.run(1, 0, 5, samples=False)
    other.run_many([4, 2, 1], [17, 3, 0], [1, 1, 5], [1, 1, 0])
    plan = builder.build()
    assert plan == other.build() and plan.total_num_tokens == 7
    assert builder.build().empty  # the builder is empty for the next plan


def test_requests_added_after_the_decodes_are_validated():
    for rows, starts, counts in (([1, 1], [0, 0], [1, 1]), ([1], [-1], [1]), ([1], [0], [0])):
        builder = StepBuilder()
        builder.run_decodes(array("i", [4]), array("i", [17]))
        builder.run_many(rows, starts, counts, [1] * len(rows))
        with pytest.raises(ValueError, match=r"each row \(batch slot\)|needs a start"):
            builder.build()
