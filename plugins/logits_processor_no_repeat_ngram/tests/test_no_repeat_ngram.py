"""Compares the forbidden tokens with a direct implementation of the rule."""

import random
from array import array
from itertools import pairwise

import pytest
import torch

from dovetail.errors import RequestError
from dovetail.interfaces import LogitsProcessorContext
from dovetail.plan import NewRequest
from dovetail.sampling_params import SamplingParams
from dovetail_no_repeat_ngram import ARGUMENT, MAX_SIZE, NoRepeatNgram

VOCAB = 9


def make():
    context = LogitsProcessorContext(vocab_size=VOCAB, max_num_seqs=4, device=torch.device("cpu"))
    return NoRepeatNgram(context)


def join(processor, row, tokens, size):
    params = SamplingParams(extra_args={} if size is None else {ARGUMENT: size})
    request = NewRequest(
        request_id=str(row),
        row=row,
        generation=1,
        token_ids=array("i", tokens),
        num_prompt_tokens=len(tokens),
        sampling_params=params,
        stop_token_ids=frozenset(),
        bad_words_token_ids=(),
        seed=0,
    )
    return processor.join(request)


def banned(processor, row):
    (logits,) = processor.apply(torch.zeros(1, VOCAB), [row]).tolist()
    return {token for token, value in enumerate(logits) if value != 0}


def by_hand(tokens, size):
    """Return the tokens that would complete an n-gram that already occurs."""
    there = {tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)}
    tail = tuple(tokens[len(tokens) - size + 1 :])
    return {token for token in range(VOCAB) if (*tail, token) in there and len(tokens) >= size - 1}


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_the_tokens_that_would_repeat_an_ngram_are_forbidden(size):
    rng = random.Random(size)
    processor = make()
    tokens = [rng.randrange(4) for _ in range(3)]
    assert join(processor, 1, tokens, size)
    for _ in range(60):
        assert banned(processor, 1) == by_hand(tokens, size)
        token = rng.randrange(4)
        tokens.append(token)
        processor.accept([1], torch.tensor([token]))


def test_a_greedy_output_repeats_no_pair_of_tokens():
    processor = make()
    join(processor, 0, [1, 2], 2)
    scores = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))
    tokens = [1, 2]
    for _ in range(30):
        logits = processor.apply(scores[tokens[-1]].clone().unsqueeze(0), [0])
        tokens.append(int(logits.argmax()))
        processor.accept([0], torch.tensor(tokens[-1:]))
    pairs = list(pairwise(tokens))
    assert len(set(pairs)) == len(pairs)


def test_a_request_that_would_have_no_allowed_token_left_is_not_changed():
    processor = make()
    join(processor, 0, range(VOCAB), 1)
    assert banned(processor, 0) == set()
    only = torch.full((1, VOCAB), -torch.inf)
    only[0, 4] = 1.0
    join(processor, 1, [4], 1)
    assert processor.apply(only.clone(), [1])[0, 4] == 1.0


def test_token_ids_outside_the_vocabulary_are_ignored():
    processor = make()
    join(processor, 0, [VOCAB + 5, 3, VOCAB + 5, 3, -1], 1)
    assert banned(processor, 0) == {3}


@pytest.mark.parametrize("size", [None, 0])
def test_a_request_without_an_ngram_size_is_not_changed(size):
    assert join(make(), 0, [1, 1, 1], size) is False


@pytest.mark.parametrize("size", [-1, True, 2.0, "3", MAX_SIZE + 1, [3]])
def test_invalid_sizes_are_rejected(size):
    with pytest.raises(RequestError, match="integer from 1 to 64") as caught:
        NoRepeatNgram.check_params(SamplingParams(extra_args={ARGUMENT: size}))
    assert caught.value.parameter == f"extra_args.{ARGUMENT}"


@pytest.mark.parametrize("size", [None, 0, 1, MAX_SIZE])
def test_valid_sizes_are_accepted(size):
    NoRepeatNgram.check_params(SamplingParams(extra_args={ARGUMENT: size}))
