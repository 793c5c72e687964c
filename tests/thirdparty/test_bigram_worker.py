import json
from array import array
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from bigram_dovetail import BigramWorker
from dovetail.errors import ModelError
from dovetail.interfaces import GrammarOutput, WorkerContext
from dovetail.plan import NewRequest, StepBuilder
from dovetail.sampling_params import SamplingParams

VOCAB = 40


def model_config(folder, table):
    np.save(folder / "bigram.npy", table)
    config = {"architectures": ["Bigram"], "vocab_size": VOCAB, "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(config))
    return SimpleNamespace(model=SimpleNamespace(model_dir=folder, hf_config=config))


@pytest.fixture
def table():
    return np.random.default_rng(7).normal(size=(VOCAB, VOCAB)).astype(np.float32)


@pytest.fixture
def worker(tmp_path, table):
    config = model_config(tmp_path, table)
    new_worker = BigramWorker(WorkerContext(config=config, platform=None, plugins=None))
    new_worker.init_device()
    new_worker.load_model()
    return new_worker


def joining(row, tokens, **params):
    return NewRequest(
        request_id=f"r{row}",
        row=row,
        generation=1,
        token_ids=array("i", tokens),
        num_prompt_tokens=len(tokens),
        sampling_params=SamplingParams(**params),
        stop_token_ids=frozenset(),
        bad_words_token_ids=(),
        seed=params.get("seed", 0),
    )


def step(worker, builder, runs, joins=(), leaves=(), grammar=None):
    for row in leaves:
        builder.leave(row)
    for request in joins:
        builder.join(request)
    for row, start, num_tokens, samples in runs:
        builder.run(row, start, num_tokens, samples=samples)
    worker.execute_model(builder.build())
    return worker.sample_tokens(grammar)


def test_the_worker_reports_the_sizes_of_its_model(worker):
    assert worker.get_model_info().vocab_size == VOCAB
    assert worker.get_model_info().max_model_len == 64
    assert worker.get_kv_cache_spec() == {}


def test_greedy_sampling_returns_the_most_likely_tokens_of_the_table(worker, table):
    builder = StepBuilder()
    joins = [joining(0, [3, 4], temperature=0), joining(2, [9], temperature=0)]
    first = step(worker, builder, [(2, 0, 1, True), (0, 0, 2, True)], joins)
    assert list(first.token_ids) == [table[9].argmax(), table[4].argmax()]
    assert list(first.num_sampled) == [1, 1]
    second = step(worker, builder, [(0, 2, 1, True)])
    assert list(second.token_ids) == [table[first.token_ids[1]].argmax()]
    assert second.step_id == 1


def test_no_token_is_sampled_after_an_incomplete_prompt_chunk(worker):
    output = step(worker, StepBuilder(), [(0, 0, 2, False)], [joining(0, [1, 2, 3])])
    assert (list(output.num_sampled), list(output.token_ids)) == ([0], [])


def test_the_state_of_a_row_is_reset_for_the_next_request(worker, table):
    builder = StepBuilder()
    step(worker, builder, [(0, 0, 1, True)], [joining(0, [5], temperature=0)])
    again = step(worker, builder, [(0, 0, 1, True)], [joining(0, [6], temperature=0)], leaves=[0])
    assert list(again.token_ids) == [table[6].argmax()]


def test_a_seed_gives_the_same_token_in_any_batch(worker):
    alone = step(worker, StepBuilder(), [(0, 0, 1, True)], [joining(0, [5], seed=11)])
    joins = [joining(1, [8], seed=3), joining(4, [5], seed=11)]
    both = step(worker, StepBuilder(), [(1, 0, 1, True), (4, 0, 1, True)], joins)
    assert both.token_ids[1] == alone.token_ids[0]


def test_sampled_tokens_have_the_softmax_distribution(worker, table):
    num_draws = 4000
    draws = Counter()
    for seed in range(num_draws):
        joins = [joining(0, [5], seed=seed, temperature=0.7)]
        output = step(worker, StepBuilder(), [(0, 0, 1, True)], joins)
        draws[output.token_ids[0]] += 1
        worker.shutdown()
    weights = np.exp(table[5].astype(np.float64) / 0.7)
    expected = weights / weights.sum() * num_draws
    statistic = sum((draws[i] - e) ** 2 / e for i, e in enumerate(expected))
    # A chi-square of 39 degrees of freedom exceeds 72.1 in one of 1,000 trials; seeds are fixed.
    assert statistic < 72.1


def test_sampled_tokens_follow_the_grammar(worker):
    bits = np.zeros(64, np.uint8)
    bits[17] = 1
    grammar = GrammarOutput(runs=(1,), bitmask=np.packbits(bits, bitorder="little").tobytes())
    joins = [joining(0, [1], temperature=0), joining(1, [1], temperature=0)]
    runs = [(0, 0, 1, True), (1, 0, 1, True)]
    output = step(worker, StepBuilder(), runs, joins, grammar=grammar)
    assert output.token_ids[1] == 17 != output.token_ids[0]


def test_a_logits_table_of_the_wrong_shape_is_rejected(tmp_path, table):
    config = model_config(tmp_path, table[:-1])
    worker = BigramWorker(WorkerContext(config=config, platform=None, plugins=None))
    with pytest.raises(ModelError, match=r"\(39, 40\).*vocab_size=40"):
        worker.load_model()
    (tmp_path / "bigram.npy").write_bytes(b"not an array")
    with pytest.raises(ModelError, match=r"bigram\.npy"):
        worker.load_model()
