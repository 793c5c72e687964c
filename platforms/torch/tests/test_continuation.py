"""Steps that continue the last step: the conditions, and that tokens do not change."""

import numpy as np
import pytest

from dovetail.interfaces import GrammarOutput
from dovetail_devkit.harnesses.runner_harness import Builder, CountingBackend

PROMPT = [3, 1, 4, 1]

counting = pytest.mark.parametrize("runner", [CountingBackend], indirect=True)


@counting
def test_step_columns_are_incremented_until_the_end_of_a_block(steps, model):
    expected = model.answer(PROMPT, 9)
    actual = [steps.join(1, PROMPT, [7, 2, 5]).run((1, 0, 4, True))[1]]
    for position, num_gathered in zip(range(4, 12), (2, 2, 2, 2, 3, 3, 3, 3), strict=True):
        actual.append(steps.run((1, position, 1, True))[1])
        assert len(Builder.seen) == num_gathered
    assert actual == expected


@counting
def test_sampled_tokens_are_written_before_the_next_step_is_gathered(steps, model):
    steps.join(0, PROMPT, [7, 2]).join(2, PROMPT, [3, 4])
    steps.run((2, 0, 4, True), (0, 0, 4, True))
    for position in (4, 5, 6):
        steps.run((2, position, 1, True), (0, position, 1, True))
    assert len(Builder.seen) == 2
    steps.builder.leave(2)
    steps.join(1, [8], [9])
    actual = steps.run((0, 7, 1, True), (1, 0, 1, True))
    assert actual == {0: model.answer(PROMPT, 5)[4], 1: model.answer([8], 1)[0]}
    # The row has all tokens, so it generates the same tokens after a preemption.
    actual = steps.run((0, 0, 8, True), (1, 1, 1, True))
    assert actual == {0: model.answer(PROMPT, 5)[4], 1: model.answer([8], 2)[1]}


@counting
@pytest.mark.parametrize("change", ["order", "start", "count", "samples", "fewer", "block"])
def test_step_inputs_are_gathered_again_after_a_change_other_than_one_token_per_request(
    steps, model, change
):
    for row, blocks in ((0, [7]), (1, [2])):
        steps.join(row, [3], blocks)
    steps.run((0, 0, 1, True), (1, 0, 1, True))
    steps.run((0, 1, 1, True), (1, 1, 1, True))
    assert len(Builder.seen) == 1
    if change == "block":
        steps.builder.grow(1, [5])
    runs = {
        "order": ((1, 2, 1, True), (0, 2, 1, True)),
        "start": ((0, 2, 1, True), (1, 1, 1, True)),
        "count": ((0, 2, 1, True), (1, 1, 2, True)),
        "samples": ((0, 2, 1, True), (1, 2, 1, False)),
        "fewer": ((0, 2, 1, True),),
        "block": ((0, 2, 1, True), (1, 2, 1, True)),
    }[change]
    actual = steps.run(*runs)
    assert len(Builder.seen) == 2
    assert actual[0] == model.answer([3], 3)[2]
    if 1 in actual:
        assert actual[1] == model.answer([3], 2 if change == "start" else 3)[-1]


def test_sampled_tokens_do_not_depend_on_whether_a_step_continues(steps):
    sampling = {"temperature": 2.0, "seed": 5}
    steps.join(0, [3], [7], **sampling)
    together = [steps.run((0, position, 1, True))[0] for position in range(4)]
    steps.builder.leave(0)
    steps.join(0, [3], [7], **sampling)
    separate = []
    for position in range(4):
        steps.join(1, [5], [2])  # a request joins and leaves in every step
        separate.append(steps.run((0, position, 1, True), (1, 0, 1, True))[0])
        steps.builder.leave(1)
    assert together == separate


@counting
def test_a_grammar_is_applied_in_a_step_that_continues(steps, model):
    steps.join(0, [3], [7]).run((0, 0, 1, True))
    grammar = GrammarOutput(runs=(0,), bitmask=np.array([[1 << 11]], np.uint32).tobytes())
    assert steps.run((0, 1, 1, True), grammar=grammar) == {0: 11}
    expected = int(model.logits([3, model.answer([3], 1)[0], 11]).argmax())
    assert steps.run((0, 2, 1, True)) == {0: expected}
    assert len(Builder.seen) == 1
