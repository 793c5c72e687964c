"""Random numbers and sampled tokens: distributions, extreme values, independence of the batch."""

from array import array

import numpy as np
import pytest
import torch

from dovetail.plan import NewRequest
from dovetail.sampling_params import SamplingParams
from dovetail_torch.sampling import Sampler
from dovetail_torch.sampling.drawing import draw, exponentiate
from dovetail_torch.sampling.random_numbers import uniforms

HOST = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def new_request(row, *, seed, prompt=(1, 2, 3), output=(), **params):
    return NewRequest(
        request_id=str(row),
        row=row,
        generation=1,
        token_ids=array("i", [*prompt, *output]),
        num_prompt_tokens=len(prompt),
        sampling_params=SamplingParams(**params),
        stop_token_ids=frozenset(),
        bad_words_token_ids=(),
        seed=seed,
    )


def chi_square(observed, probs):
    """Return how many standard deviations the statistic lies above its expectation."""
    expected = probs * observed.sum()
    used = expected > 0
    assert observed[~used].sum() == 0, "a token of probability 0 was drawn"
    statistic = ((observed - expected)[used] ** 2 / expected[used]).sum().item()
    freedom = int(used.sum()) - 1
    return (statistic - freedom) / (2 * freedom) ** 0.5


def test_random_numbers_are_uniform_and_uncorrelated():
    count = 20000
    for numbers in (
        uniforms(np.full(count, 7, np.uint64), np.arange(count)),
        uniforms(np.arange(count, dtype=np.uint64), np.full(count, 12)),
    ):
        assert numbers.min() >= 0 and numbers.max() < 1
        bins = torch.from_numpy(np.bincount((numbers * 64).astype(int), minlength=64)).double()
        assert abs(chi_square(bins, torch.full((64,), 1 / 64).double())) < 4
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 4 / count**0.5
    ends = np.array([0, 2**64 - 1, 2**63], np.uint64)
    assert len(set(uniforms(ends, np.zeros(3, np.int64)).tolist())) == 3


@pytest.mark.costly
@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.8},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1, "top_p": 0.9, "top_k": 12},
        {"repetition_penalty": 1.5, "logit_bias": {4: 2.0}},
    ],
)
def test_sampled_tokens_follow_the_distribution(settings):
    """Samples 6144 tokens: 256 requests with 24 positions each, all with the same logits."""
    num_rows, vocab = 256, 40
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(2)) * 1.5
    sampler = Sampler(num_rows=num_rows, vocab_size=vocab, device=HOST)
    observed = torch.zeros(vocab, dtype=torch.float64)
    rows = list(range(num_rows))
    for position in range(24):
        for row in rows if "repetition_penalty" in settings or not position else ():
            prompt = [1] * (3 + position)  # the row joins again, so that its penalties apply
            sampler.join(new_request(row, seed=1000 + row, prompt=prompt, **settings))
        probs = sampler.distribution(logits.clone(), [0])[0].double()
        tokens = sampler.sample(logits.repeat(num_rows, 1), rows).token_ids
        observed += torch.bincount(tokens, minlength=vocab)
    assert abs(chi_square(observed, probs)) < 4


def test_tokens_sampled_from_a_large_vocabulary_follow_the_distribution():
    """Some tokens at both ends and in the last block have a high probability."""
    vocab, count = 151_936 + 5, 20_000
    weights = torch.full((1, vocab), 1e-6)
    weights[0, [0, 511, 512, 70_000, vocab - 1]] = torch.tensor([0.1, 0.2, 0.05, 0.3, 0.2])
    weights[0, 1:500] = 0
    numbers = torch.from_numpy(uniforms(np.full(count, 3, np.uint64), np.arange(count)))
    tokens = torch.cat([draw(weights, number.view(1, 1)) for number in numbers[:2000]])
    buckets = torch.tensor([0, 511, 512, 70_000, vocab - 1])
    observed = torch.tensor([(tokens == b).sum() for b in buckets] + [0]).double()
    observed[-1] = len(tokens) - observed.sum()
    assert not bool(((tokens > 0) & (tokens < 500)).any())
    probs = (weights.double() / weights.double().sum())[0]
    expected = torch.cat((probs[buckets], (1 - probs[buckets].sum())[None]))
    assert abs(chi_square(observed, expected)) < 4


@pytest.mark.parametrize("vocab", [10, 512, 1500])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_tokens_of_probability_zero_are_never_sampled(vocab, dtype):
    ends = torch.tensor([[0.0], [1 - 2**-24], [1 - 2**-53], [1.0]], dtype=torch.float64).to(dtype)
    for first, last in [(0, 0), (3, 5), (vocab - 1, vocab - 1), (0, vocab - 1), (7, vocab - 2)]:
        weights = torch.zeros(4, vocab)
        weights[:, first] = 0.1
        weights[:, last] = 0.3
        tokens = draw(weights, ends).tolist()
        assert tokens == [first, last, last, last]


def test_exponentiate_returns_zero_for_tiny_probabilities():
    weights = exponentiate(torch.tensor([[1.0, -torch.inf, 3.0], [-torch.inf] * 3]))
    assert weights[0].tolist() == pytest.approx([0.1353353, 0.0, 1.0])
    assert weights[1].tolist() == [0.0, 0.0, 0.0]


SETTINGS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"top_k": 4},
    {"top_p": 0.6},
    {"top_p": 0.97, "temperature": 1.8},
    {"top_k": 700, "top_p": 0.9},
    {"min_p": 0.1},
    {"frequency_penalty": 0.7},
]


def test_tokens_do_not_depend_on_batch_preemption_or_order():
    """bfloat16 logits have equal values. With a flat distribution, top-p keeps many tokens."""
    vocab, steps = 5000, 12
    random = torch.Generator().manual_seed(8)
    logits = torch.randn(len(SETTINGS), steps, vocab, generator=random).bfloat16()
    alone = {}
    for row, settings in enumerate(SETTINGS):
        sampler = Sampler(num_rows=1, vocab_size=vocab, device=HOST)
        sampler.join(new_request(0, seed=50 + row, **settings))
        alone[row] = [
            sampler.sample(logits[row, step][None].clone(), [0]).token_ids.item()
            for step in range(steps)
        ]
    together = Sampler(num_rows=16, vocab_size=vocab, device=HOST)
    for row, settings in enumerate(SETTINGS):
        together.join(new_request(15 - row, seed=50 + row, **settings))
    actual = {row: [] for row in alone}
    for step in range(steps):
        order = [(row + step) % len(SETTINGS) for row in range(len(SETTINGS))]
        if step == 5:  # all requests are preempted and resume in other rows
            for row in alone:
                together.leave(15 - row)
            for row, settings in enumerate(SETTINGS):
                request = new_request(15 - row, seed=50 + row, output=actual[row], **settings)
                together.join(request)
        batch = torch.stack([logits[row, step] for row in order])
        tokens = together.sample(batch, [15 - row for row in order]).token_ids.tolist()
        for row, token in zip(order, tokens, strict=True):
            actual[row].append(token)
    assert actual == alone


def test_tokens_depend_on_seed_and_position():
    logits = torch.zeros(1, 5000)
    draws = {}
    for seed in (1, 2, -1, 2**64 - 2):
        sampler = Sampler(num_rows=1, vocab_size=5000, device=HOST)
        sampler.join(new_request(0, seed=seed))
        draws[seed] = [sampler.sample(logits.clone(), [0]).token_ids.item() for _ in range(5)]
        assert len(set(draws[seed])) > 3
    assert len(set(map(tuple, draws.values()))) == 4
