"""The runner computes tokens from plans. The model is tiny, and its attention sums the cache."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from dovetail.interfaces import GrammarOutput
from dovetail_devkit.harnesses.runner_harness import MAX_LEN, SIZE, Builder, V

PROMPT = [3, 1, 4, 1, 5, 9]


def test_a_request_uses_its_sampled_tokens_as_the_next_inputs(steps, model):
    expected = model.answer(PROMPT, 4)
    actual = [steps.join(1, PROMPT, [7, 2, 5]).run((1, 0, 6, True))[1]]
    actual += [steps.run((1, position, 1, True))[1] for position in (6, 7, 8)]
    assert actual == expected
    assert model.forwards[0] == (PROMPT, [0, 1, 2, 3, 4, 5])
    assert model.forwards[2] == ([expected[1]], [7])


def test_prompts_and_decodes_are_computed_in_one_step(steps, model):
    other = [8, 8, 2]
    steps.join(0, PROMPT, [7, 2, 5]).run((0, 0, 6, True))
    steps.join(2, other, [3, 4])
    actual = steps.run((0, 6, 1, True), (2, 0, 3, True))
    assert actual == {0: model.answer(PROMPT, 2)[1], 2: model.answer(other, 1)[0]}
    actual = steps.run((2, 3, 1, True), (0, 7, 1, True))  # runs may be in any order
    assert actual == {0: model.answer(PROMPT, 3)[2], 2: model.answer(other, 2)[1]}


@pytest.mark.parametrize("narrows", [True, False])
def test_only_needed_tokens_are_computed_after_the_last_attention(steps, model, narrows):
    model.narrows = narrows
    other = [8, 8, 2, 7, 1]
    steps.join(0, PROMPT, [7, 2, 5]).join(1, PROMPT, [1, 6], prompt_logprobs=0)
    steps.join(2, other, [3, 4])
    actual = steps.run((0, 0, 6, True), (2, 0, 2, False))
    steps.run((2, 2, 2, False))
    actual |= steps.run((2, 4, 1, True), (0, 6, 1, True)) | steps.run((1, 0, 6, True))
    first, second = model.answer(PROMPT, 2)
    assert actual == {0: second, 1: first, 2: model.answer(other, 1)[0]}
    # cases: one row samples, none, all, and one requests prompt log-probabilities
    assert model.num_left == ([1, 1, 2, 6] if narrows else [8, 2, 2, 6])


@pytest.mark.parametrize("cuts", [(1,), (4,), (2, 5), (1, 2, 3, 4, 5)])
def test_chunks_give_the_same_tokens_as_a_whole_prompt(steps, model, cuts):
    steps.join(0, PROMPT, [7, 2])
    borders = [0, *cuts, 6]
    for start, end in pairwise(borders):
        actual = steps.run((0, start, end - start, end == 6))
        assert (0 in actual) == (end == 6)
    assert actual == {0: model.answer(PROMPT, 1)[0]}


def test_a_reused_row_has_no_state_of_the_previous_request(steps, model):
    steps.join(0, PROMPT, [7, 2, 5], temperature=1.0, allowed_token_ids=[3]).run((0, 0, 6, True))
    steps.builder.leave(0)
    other = [2, 2]
    assert steps.join(0, other, [5, 7]).run((0, 0, 2, True)) == {0: model.answer(other, 1)[0]}
    assert steps.run((0, 2, 1, True)) == {0: model.answer(other, 2)[1]}


def test_a_new_request_with_an_older_row_generation_is_rejected(steps):
    steps.join(0, PROMPT, [7, 2]).run((0, 0, 6, True))
    steps.generations[0] = 0
    with pytest.raises(AssertionError, match="generation"):
        steps.join(0, PROMPT, [7, 2]).run((0, 0, 6, True))


def test_a_resumed_request_keeps_its_tokens(steps, model):
    expected = model.answer(PROMPT, 3)
    tokens = [*PROMPT, *expected[:2]]
    actual = steps.join(1, tokens, [4, 9], num_prompt=6).run((1, 0, 8, True))
    assert actual == {1: expected[2]}


def test_cached_blocks_are_not_recomputed(steps, model):
    steps.join(0, PROMPT, [7, 2]).run((0, 0, 6, True))
    longer = [*PROMPT[:4], 6, 6]
    assert steps.join(1, longer, [7, 9]).run((1, 4, 2, True)) == {1: model.answer(longer, 1)[0]}
    assert model.forwards[-1] == ([6, 6], [4, 5])


def test_a_plan_without_scheduled_requests_releases_rows(steps, model):
    steps.join(0, PROMPT, [7, 2]).run((0, 0, 6, True))
    steps.builder.leave(0)
    assert steps.run() == {}
    assert list(steps.output.token_ids) == [] and len(model.forwards) == 1
    steps.join(0, [5], [2]).run((0, 0, 1, True))


def test_blocks_are_appended_as_a_request_grows(steps, model):
    expected = model.answer(PROMPT[:4], 7)
    actual = [steps.join(1, PROMPT[:4], [7]).run((1, 0, 4, True))[1]]
    for position in range(4, 10):
        if position % SIZE == 0:
            steps.builder.grow(1, [position // SIZE * 2])
        actual.append(steps.run((1, position, 1, True))[1])
    assert actual == expected
    assert Builder.seen[-1].block_table_RM.tolist() == [[7, 2, 4]]


def test_the_lm_head_gets_only_the_positions_that_are_sampled(steps, model, monkeypatch):
    sizes = []
    original = model.compute_logits
    monkeypatch.setattr(
        model, "compute_logits", lambda hidden: sizes.append(len(hidden)) or original(hidden)
    )
    steps.join(0, PROMPT, [7, 2]).join(1, PROMPT, [3, 4]).join(2, PROMPT, [5, 6])
    steps.run((0, 0, 6, True), (1, 0, 3, False), (2, 0, 6, True))
    steps.run((1, 3, 1, False))
    assert sizes == [2]


def test_block_table_entries_beyond_the_blocks_of_a_request_are_0(steps):
    steps.join(0, range(16), [7, 2, 5, 3]).run((0, 0, 16, True))
    steps.builder.leave(0)
    steps.join(0, [1], [4]).join(1, range(12), [8, 9, 10])
    steps.run((0, 0, 1, True), (1, 0, 12, True))
    assert Builder.seen[-1].block_table_RM.tolist() == [[4, 0, 0], [8, 9, 10]]


def test_the_attention_batch_has_correct_indices(steps):
    steps.join(0, PROMPT, [7, 2]).join(2, [8], [3])
    steps.run((2, 0, 1, True), (0, 0, 5, False))
    batch = Builder.seen[-1]
    assert batch.query_start_R1.tolist() == [0, 1, 6]
    assert batch.seq_lens_R.tolist() == list(batch.seq_lens) == [1, 5]
    assert list(batch.query_lens) == [1, 5] and batch.num_requests == 2
    assert batch.block_table_RM.tolist() == [[3, 0], [7, 2]]
    assert batch.slot_mapping_T.tolist() == [12, 28, 29, 30, 31, 8]
    assert batch.query_start_R1.dtype == batch.seq_lens_R.dtype == torch.int32
    assert batch.block_table_RM.dtype == torch.int32
    assert batch.slot_mapping_T.dtype == torch.int64


def test_a_request_may_have_max_model_len_tokens(steps, model):
    prompt = [n % V for n in range(MAX_LEN - 1)]
    actual = steps.join(2, prompt, range(1, 7)).run((2, 0, MAX_LEN - 1, True))
    assert actual == {2: model.answer(prompt, 1)[0]}


def test_grammars_are_applied_only_to_their_requests(steps, model):
    steps.join(0, PROMPT, [7, 2]).join(1, PROMPT, [3, 4]).join(2, PROMPT, [5, 6])
    words = np.zeros((1, 1), np.uint32)
    words[0, 0] = 1 << 11
    grammar = GrammarOutput(runs=(2,), bitmask=words.tobytes())
    actual = steps.run((0, 0, 6, True), (1, 0, 2, False), (2, 0, 6, True), grammar=grammar)
    assert actual == {0: model.answer(PROMPT, 1)[0], 2: 11}


def test_only_requests_with_logprobs_get_logprobs(steps, model):
    steps.join(0, PROMPT, [7, 2]).join(1, [8], [3]).join(2, PROMPT[:3], [5], logprobs=2)
    actual = steps.run((0, 0, 3, False), (1, 0, 1, True), (2, 0, 3, True))
    assert list(steps.output.logprobs) == [2]
    columns = steps.output.logprobs[2]
    expected = model.logits(PROMPT[:3]).log_softmax(-1)
    assert list(columns.counts) == [3] and columns.token_ids[0] == actual[2]
    best = expected.topk(2)
    assert list(columns.token_ids[1:]) == best.indices.tolist()
    assert list(columns.logprobs[1:]) == pytest.approx(best.values.tolist(), abs=1e-5)
    assert list(columns.ranks) == [1]


@pytest.mark.parametrize("cuts", [(), (4,), (1, 5)])
def test_prompt_logprobs_cover_each_position_once(steps, model, cuts):
    steps.join(0, PROMPT, [7, 2], prompt_logprobs=0).join(1, [8], [3])
    pairs, borders = [], [0, *cuts, 6]
    for start, end in pairwise(borders):
        steps.run((1, 0, 1, True), (0, start, end - start, end == 6))
        columns = steps.output.prompt_logprobs.get(1)
        assert set(steps.output.prompt_logprobs) <= {1}
        pairs += zip(columns.token_ids, columns.logprobs, strict=True) if columns else []
    expected = [
        (PROMPT[n], float(model.logits(PROMPT[:n]).log_softmax(-1)[PROMPT[n]])) for n in range(1, 6)
    ]
    assert [token for token, _ in pairs] == [token for token, _ in expected]
    assert [p for _, p in pairs] == pytest.approx([p for _, p in expected], abs=1e-5)


def test_a_dummy_run_changes_no_state(steps, runner, model):
    steps.join(0, PROMPT, [7, 2]).run((0, 0, 6, True))
    runner.loaded.dummy_run(30, 2)
    assert model.forwards[-1][1][-1] < MAX_LEN
    assert steps.run((0, 6, 1, True)) == {0: model.answer(PROMPT, 2)[1]}
