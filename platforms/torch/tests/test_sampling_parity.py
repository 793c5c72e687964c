"""The processed distribution compared with transformers, and penalties with formulas."""

from array import array

import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dovetail.plan import NewRequest
from dovetail.sampling_params import SamplingParams
from dovetail_torch.sampling import Sampler
from dovetail_torch.sampling.truncation import rank

HOST = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def new_request(row, prompt, output, params, bad=()):
    return NewRequest(
        request_id=str(row),
        row=row,
        generation=1,
        token_ids=array("i", [*prompt, *output]),
        num_prompt_tokens=len(prompt),
        sampling_params=params,
        stop_token_ids=frozenset(),
        bad_words_token_ids=tuple(bad),
        seed=row,
    )


def oracle(logits, tokens, params, bad=()):
    steps = LogitsProcessorList()
    if bad:
        steps.append(NoBadWordsLogitsProcessor([list(word) for word in bad], eos_token_id=None))
    if params.repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    steps.append(TemperatureLogitsWarper(params.temperature))
    if params.min_p:
        steps.append(MinPLogitsWarper(params.min_p))
    if params.top_k:
        steps.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        steps.append(TopPLogitsWarper(params.top_p))
    return steps(torch.tensor([tokens]), logits[None].clone()).softmax(-1)[0]


SETTINGS = [
    {"temperature": 0.7},
    {"temperature": 1.0},
    {"top_k": 1},
    {"top_k": 20},
    {"top_k": 1000},
    {"top_k": 2000},
    {"top_k": 10**6},
    {"top_p": 0.1},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 50, "top_p": 0.8},
    {"top_k": 3000, "top_p": 0.6},
    {"min_p": 0.02, "top_k": 30, "top_p": 0.95, "temperature": 1.7},
    {"min_p": 0.01, "top_p": 0.7},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.5, "temperature": 0.6, "top_k": 20, "top_p": 0.95},
]


@pytest.mark.parametrize("vocab", [300, 5003, 20480])
@pytest.mark.parametrize("spread", [0.3, 4.0])
def test_the_sampling_distribution_equals_that_of_transformers(vocab, spread):
    """One batch has rows with every parameter and a greedy row.

    Distributions are flat and sharp.
    """
    random = torch.Generator().manual_seed(vocab)
    num_rows = len(SETTINGS)
    logits = torch.randn(num_rows + 1, vocab, generator=random) * spread
    tokens = torch.randint(0, vocab, (num_rows + 1, 40), generator=random).tolist()
    sampler = Sampler(num_rows=32, vocab_size=vocab, device=HOST)
    for row, settings in enumerate([*SETTINGS, {"temperature": 0.0}]):
        params = SamplingParams(**settings)
        sampler.join(new_request(row, tokens[row][:30], tokens[row][30:], params))
    rows = [num_rows, *range(num_rows)]
    actual = sampler.distribution(logits[rows].clone(), rows)
    assert actual[0, logits[num_rows].argmax()] == 1
    for row, settings in enumerate(SETTINGS):
        params = SamplingParams(**settings)
        clipped = SamplingParams(**{**settings, "top_k": min(params.top_k, vocab)})
        expected = oracle(logits[row], tokens[row], clipped)
        torch.testing.assert_close(actual[row + 1], expected, rtol=2e-5, atol=1e-7)
        differing = ((actual[row + 1] > 0) != (expected > 0)).sum().item()
        # Where the mass is close to p, float32 rounding may add or remove one token.
        assert differing <= (1 if params.top_p < 1 else 0), settings


def test_bad_words_have_the_same_effect_as_in_transformers():
    random = torch.Generator().manual_seed(7)
    logits = torch.randn(1, 50, generator=random)
    output = [4, 8, 15, 16, 23, 42]
    bad = [(3,), (42, 9), (23, 42, 10), (16, 42, 11), (4, 8, 15, 16, 23, 42, 12)]
    sampler = Sampler(num_rows=1, vocab_size=50, device=HOST)
    params = SamplingParams(temperature=1.0)
    sampler.join(new_request(0, [1], output, params, bad))
    actual = sampler.distribution(logits.clone(), [0])[0]
    torch.testing.assert_close(actual, oracle(logits[0], [1, *output], params, bad))
    assert (actual == 0).nonzero().flatten().tolist() == [3, 9, 10, 12]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_penalties_equal_their_formulas_in_every_step(dtype):
    """The expected values are computed in float32 from unprocessed logits and sampled tokens."""
    random = torch.Generator().manual_seed(11)
    vocab, prompt = 60, [1, 2, 2, 3]
    sampler = Sampler(num_rows=4, vocab_size=vocab, device=HOST)
    all_settings = {
        0: {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.7},
        1: {"frequency_penalty": -0.5},
        2: {"presence_penalty": 1.5, "top_k": 4},
        3: {},
    }
    outputs = {row: [3, 5, 5] if row == 0 else [] for row in all_settings}
    for row, settings in all_settings.items():
        sampler.join(new_request(row, prompt, outputs[row], SamplingParams(**settings)))
    rows = [2, 0, 3, 1]
    for _ in range(30):
        logits = (torch.randn(4, vocab, generator=random) * 3).to(dtype)
        actual = sampler.distribution(logits.clone(), rows)
        for i, row in enumerate(rows):
            params, x = SamplingParams(**all_settings[row]), logits[i].float()
            was_generated = torch.zeros(vocab, dtype=torch.bool)
            was_generated[prompt + outputs[row]] = True
            scaled = torch.where(
                x > 0, x / params.repetition_penalty, x * params.repetition_penalty
            )
            x = torch.where(was_generated, scaled, x)
            count = torch.bincount(torch.tensor(outputs[row], dtype=torch.int64), minlength=vocab)
            x = x - params.frequency_penalty * count - params.presence_penalty * (count > 0)
            if params.top_k:
                _, order = x.sort(descending=True, stable=True)
                x[order[params.top_k :]] = -torch.inf  # exactly k, even with ties
            torch.testing.assert_close(actual[i], x.softmax(-1), rtol=1e-5, atol=1e-7)
        tokens = sampler.sample(logits.clone(), rows).token_ids.tolist()
        for row, token in zip(rows, tokens, strict=True):
            outputs[row].append(token)


def test_tiny_temperature_and_penalty_give_no_nan():
    sampler = Sampler(num_rows=1, vocab_size=20, device=HOST)
    settings = SamplingParams(temperature=1e-5, repetition_penalty=1e-300)
    sampler.join(new_request(0, [3, 4], [], settings))
    logits = torch.linspace(-50, 50, 20)[None]
    probs = sampler.distribution(logits, [0])
    assert probs[0, 19] + probs[0, 3] + probs[0, 4] == 1


@pytest.mark.parametrize("vocab", [1000, 4097, 30000])
@pytest.mark.parametrize("num_best", [1, 5, 64, 777])
def test_the_order_of_the_most_likely_tokens_equals_that_of_a_stable_sort(vocab, num_best):
    """The logits include equal values, signed zeros and -inf."""
    random = torch.Generator().manual_seed(vocab + num_best)
    logits = torch.randint(-40, 40, (3, vocab), generator=random) / 4
    logits[1] = torch.randn(vocab, generator=random)
    logits[2] = -torch.inf
    logits[2, vocab // 2 :: 999] = 0.0
    logits[2, vocab // 3] = -0.0
    values, columns = rank(logits, num_best)
    expected, order = logits.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(values, expected[:, :num_best])
    assert torch.equal(columns, order[:, :num_best])
