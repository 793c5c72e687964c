"""The runner on a tiny model whose attention sums what the cache holds: plans in, tokens out."""

from array import array
from functools import partial
from itertools import pairwise
from typing import ClassVar

import numpy as np
import pytest
import torch

from dovetail.interfaces import (
    AttentionBackend,
    AttentionCapabilities,
    AttentionLayer,
    AttentionMetadataBuilder,
    GrammarOutput,
    KVCacheConfig,
    KVCacheGroup,
)
from dovetail.plan import NewRequest, StepBuilder
from dovetail.sampling_params import SamplingParams
from dovetail_torch.layers import Attention
from dovetail_torch.layers.linear import HeadShape
from dovetail_torch.runner.kv_cache import kv_cache_specs
from dovetail_torch.runner.model_runner import ModelRunner
from dovetail_torch.runner.step_limits import StepLimits

V, D, SIZE, NUM_BLOCKS, MAX_LEN = 23, 4, 4, 12, 24


class Builder(AttentionMetadataBuilder):
    seen: ClassVar[list] = []

    def build(self, batch):
        Builder.seen.append(batch)
        return batch


class Layer(AttentionLayer):
    """Each token's result is the sum of all values of its row up to its own, read slot by slot."""

    def __init__(self, context):
        pass

    def forward(self, q_THD, k_TKD, v_TKD, kv_cache, metadata, out_THD):
        values_SD = kv_cache.view(-1, 2, D)[:, 1]
        values_SD[metadata.slot_mapping_T] = v_TKD[:, 0]
        first = 0
        for run, (count, length) in enumerate(
            zip(metadata.query_lens, metadata.seq_lens, strict=True)
        ):
            table = metadata.block_table_RM[run].tolist()
            slots = [table[place // SIZE] * SIZE + place % SIZE for place in range(length)]
            sums = values_SD[slots].cumsum(0)
            out_THD[first : first + count, 0] = sums[length - count :]
            first += count


class Backend(AttentionBackend):
    name = "sum"
    capabilities = AttentionCapabilities(dtypes=frozenset({"float64"}))

    @staticmethod
    def kv_cache_shape(num_blocks, spec):
        return (num_blocks, spec.block_size, 2, D)

    @staticmethod
    def create_builder(context):
        Builder.seen = []
        return Builder()

    @staticmethod
    def create_layer(context):
        return Layer(context)


class Model:
    """Next token: the one whose column the sum of all embeddings so far points at most."""

    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.embedding_VD = torch.randn(V, D, generator=generator)
        self.head_DV = torch.randn(D, V, generator=generator)
        self.attention = Attention(HeadShape(num_heads=1, num_kv_heads=1, head_size=D), 0)
        self.forwards = []

    def forward(self, input_ids_T, positions_T, attention):
        self.forwards.append((input_ids_T.tolist(), positions_T.tolist()))
        x_T1D = self.embedding_VD[input_ids_T].unsqueeze(1)
        return self.attention(x_T1D, x_T1D, x_T1D, attention)

    def compute_logits(self, hidden_SD):
        return hidden_SD @ self.head_DV

    def logits(self, tokens):
        return self.embedding_VD[tokens].sum(0) @ self.head_DV

    def answer(self, prompt, num_tokens):
        tokens = list(prompt)
        for _ in range(num_tokens):
            tokens.append(int(self.logits(tokens).argmax()))
        return tokens[len(prompt) :]


@pytest.fixture
def model():
    return Model()


@pytest.fixture
def runner(model):
    limits = StepLimits(
        max_num_seqs=3,
        max_num_batched_tokens=32,
        max_model_len=MAX_LEN,
        dtype=torch.float32,
        kv_cache_dtype="float32",
        device=torch.device("cpu"),
    )
    made = ModelRunner(model, num_layers=1, vocab_size=V, limits=limits)
    layers = {"layer": model.attention}
    specs = kv_cache_specs(layers, block_size=SIZE, dtype="float32")
    group = KVCacheGroup(layer_names=("layer",), spec=specs["layer"])
    config = KVCacheConfig(num_blocks=NUM_BLOCKS, groups=(group,))
    made.initialize_cache(config, Backend, layers, partial(torch.zeros, dtype=torch.uint8))
    return made


class Steps:
    """Builds plans for a runner and remembers generations."""

    def __init__(self, runner):
        self.runner, self.builder, self.generations = runner, StepBuilder(), {}

    def join(self, row, tokens, blocks, *, num_prompt=None, **params):
        self.generations[row] = self.generations.get(row, 0) + 1
        given = {"temperature": 0, "max_tokens": 20} | params
        self.builder.join(
            NewRequest(
                request_id=f"r{row}",
                row=row,
                generation=self.generations[row],
                token_ids=array("i", tokens),
                num_prompt_tokens=num_prompt or len(tokens),
                sampling_params=SamplingParams(**given),
                stop_token_ids=frozenset(),
                bad_words_token_ids=(),
                seed=given.get("seed", 0),
            )
        )
        self.builder.grow(row, blocks)
        return self

    def run(self, *runs, grammar=None):
        """Runs: (row, start, count, samples). Return the tokens by row."""
        for row, start, count, samples in runs:
            self.builder.run(row, start, count, samples=samples)
        plan = self.builder.build()
        self.runner.execute_model(plan)
        self.output = self.runner.sample_tokens(grammar)
        assert self.output.step_id == plan.step_id
        assert list(self.output.num_sampled) == list(plan.samples)
        sampling = [row for row, samples in zip(plan.rows, plan.samples, strict=True) if samples]
        return dict(zip(sampling, self.output.token_ids, strict=True))


@pytest.fixture
def steps(runner):
    return Steps(runner)


PROMPT = [3, 1, 4, 1, 5, 9]


def test_a_row_goes_on_by_itself(steps, model):
    expected = model.answer(PROMPT, 4)
    got = [steps.join(1, PROMPT, [7, 2, 5]).run((1, 0, 6, True))[1]]
    got += [steps.run((1, place, 1, True))[1] for place in (6, 7, 8)]
    assert got == expected
    assert model.forwards[0] == (PROMPT, [0, 1, 2, 3, 4, 5])
    assert model.forwards[2] == ([expected[1]], [7])


def test_prompts_and_decodes_share_a_step(steps, model):
    other = [8, 8, 2]
    steps.join(0, PROMPT, [7, 2, 5]).run((0, 0, 6, True))
    steps.join(2, other, [3, 4])
    got = steps.run((0, 6, 1, True), (2, 0, 3, True))
    assert got == {0: model.answer(PROMPT, 2)[1], 2: model.answer(other, 1)[0]}
    got = steps.run((2, 3, 1, True), (0, 7, 1, True))  # in any order
    assert got == {0: model.answer(PROMPT, 3)[2], 2: model.answer(other, 2)[1]}


@pytest.mark.parametrize("cuts", [(1,), (4,), (2, 5), (1, 2, 3, 4, 5)])
def test_chunks_give_what_the_whole_gives(steps, model, cuts):
    steps.join(0, PROMPT, [7, 2])
    borders = [0, *cuts, 6]
    for start, end in pairwise(borders):
        got = steps.run((0, start, end - start, end == 6))
        assert (0 in got) == (end == 6)
    assert got == {0: model.answer(PROMPT, 1)[0]}


def test_a_reused_row_remembers_nothing(steps, model):
    steps.join(0, PROMPT, [7, 2, 5], temperature=1.0, allowed_token_ids=[3]).run((0, 0, 6, True))
    steps.builder.leave(0)
    other = [2, 2]
    assert steps.join(0, other, [5, 7]).run((0, 0, 2, True)) == {0: model.answer(other, 1)[0]}
    assert steps.run((0, 2, 1, True)) == {0: model.answer(other, 2)[1]}


def test_a_row_must_not_be_taken_over_out_of_order(steps):
    steps.join(0, PROMPT, [7, 2]).run((0, 0, 6, True))
    steps.generations[0] = 0
    with pytest.raises(AssertionError, match="out of order"):
        steps.join(0, PROMPT, [7, 2]).run((0, 0, 6, True))


def test_a_request_that_comes_back_brings_its_tokens(steps, model):
    expected = model.answer(PROMPT, 3)
    tokens = [*PROMPT, *expected[:2]]
    got = steps.join(1, tokens, [4, 9], num_prompt=6).run((1, 0, 8, True))
    assert got == {1: expected[2]}


def test_cached_blocks_are_not_computed_again(steps, model):
    steps.join(0, PROMPT, [7, 2]).run((0, 0, 6, True))
    longer = [*PROMPT[:4], 6, 6]
    assert steps.join(1, longer, [7, 9]).run((1, 4, 2, True)) == {1: model.answer(longer, 1)[0]}
    assert model.forwards[-1] == ([6, 6], [4, 5])


def test_an_empty_plan_still_ends_rows(steps, model):
    steps.join(0, PROMPT, [7, 2]).run((0, 0, 6, True))
    steps.builder.leave(0)
    assert steps.run() == {}
    assert list(steps.output.token_ids) == [] and len(model.forwards) == 1
    steps.join(0, [5], [2]).run((0, 0, 1, True))


def test_blocks_are_appended_as_a_row_grows(steps, model):
    expected = model.answer(PROMPT[:4], 7)
    got = [steps.join(1, PROMPT[:4], [7]).run((1, 0, 4, True))[1]]
    for place in range(4, 10):
        if place % SIZE == 0:
            steps.builder.grow(1, [place // SIZE * 2])
        got.append(steps.run((1, place, 1, True))[1])
    assert got == expected
    assert Builder.seen[-1].block_table_RM.tolist() == [[7, 2, 4]]


def test_the_head_sees_sampled_positions_only(steps, model, monkeypatch):
    sizes = []
    original = model.compute_logits
    monkeypatch.setattr(
        model, "compute_logits", lambda hidden: sizes.append(len(hidden)) or original(hidden)
    )
    steps.join(0, PROMPT, [7, 2]).join(1, PROMPT, [3, 4]).join(2, PROMPT, [5, 6])
    steps.run((0, 0, 6, True), (1, 0, 3, False), (2, 0, 6, True))
    steps.run((1, 3, 1, False))
    assert sizes == [2]


def test_entries_beyond_a_rows_blocks_are_0(steps):
    steps.join(0, range(16), [7, 2, 5, 3]).run((0, 0, 16, True))
    steps.builder.leave(0)
    steps.join(0, [1], [4]).join(1, range(12), [8, 9, 10])
    steps.run((0, 0, 1, True), (1, 0, 12, True))
    assert Builder.seen[-1].block_table_RM.tolist() == [[4, 0, 0], [8, 9, 10]]


def test_the_batch_says_where_everything_is(steps):
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


def test_a_row_may_be_filled_to_the_models_length(steps, model):
    prompt = [n % V for n in range(MAX_LEN - 1)]
    got = steps.join(2, prompt, range(1, 7)).run((2, 0, MAX_LEN - 1, True))
    assert got == {2: model.answer(prompt, 1)[0]}


def test_grammars_are_applied_to_their_runs(steps, model):
    steps.join(0, PROMPT, [7, 2]).join(1, PROMPT, [3, 4]).join(2, PROMPT, [5, 6])
    words = np.zeros((1, 1), np.uint32)
    words[0, 0] = 1 << 11
    grammar = GrammarOutput(runs=(2,), bitmask=words.tobytes())
    got = steps.run((0, 0, 6, True), (1, 0, 2, False), (2, 0, 6, True), grammar=grammar)
    assert got == {0: model.answer(PROMPT, 1)[0], 2: 11}


def test_logprobs_are_those_of_the_runs_that_asked(steps, model):
    steps.join(0, PROMPT, [7, 2]).join(1, [8], [3]).join(2, PROMPT[:3], [5], logprobs=2)
    got = steps.run((0, 0, 3, False), (1, 0, 1, True), (2, 0, 3, True))
    assert list(steps.output.logprobs) == [2]
    columns = steps.output.logprobs[2]
    expected = model.logits(PROMPT[:3]).log_softmax(-1)
    assert list(columns.counts) == [3] and columns.token_ids[0] == got[2]
    best = expected.topk(2)
    assert list(columns.token_ids[1:]) == best.indices.tolist()
    assert list(columns.logprobs[1:]) == pytest.approx(best.values.tolist(), abs=1e-5)
    assert list(columns.ranks) == [1]


@pytest.mark.parametrize("cuts", [(), (4,), (1, 5)])
def test_prompt_logprobs_cover_each_position_once(steps, model, cuts):
    steps.join(0, PROMPT, [7, 2], prompt_logprobs=0).join(1, [8], [3])
    found, borders = [], [0, *cuts, 6]
    for start, end in pairwise(borders):
        steps.run((1, 0, 1, True), (0, start, end - start, end == 6))
        columns = steps.output.prompt_logprobs.get(1)
        assert set(steps.output.prompt_logprobs) <= {1}
        found += zip(columns.token_ids, columns.logprobs, strict=True) if columns else []
    expected = [
        (PROMPT[n], float(model.logits(PROMPT[:n]).log_softmax(-1)[PROMPT[n]])) for n in range(1, 6)
    ]
    assert [token for token, _ in found] == [token for token, _ in expected]
    assert [p for _, p in found] == pytest.approx([p for _, p in expected], abs=1e-5)


def test_a_dummy_run_leaves_no_trace(steps, runner, model):
    steps.join(0, PROMPT, [7, 2]).run((0, 0, 6, True))
    runner.dummy_run(30, 2)
    assert model.forwards[-1][1][-1] < MAX_LEN
    assert steps.run((0, 6, 1, True)) == {0: model.answer(PROMPT, 2)[1]}
