"""Raw log-probabilities, and the ranks of tokens."""

from array import array

import pytest
import torch

from dovetail.plan import NewRequest
from dovetail.sampling_params import SamplingParams
from dovetail_torch.sampling import Sampler, gather_logprobs

HOST = torch.device("cpu")


def new_request(row, **params):
    return NewRequest(
        request_id=str(row),
        row=row,
        generation=1,
        token_ids=array("i", [1, 2, 3]),
        num_prompt_tokens=3,
        sampling_params=SamplingParams(**params),
        stop_token_ids=frozenset(),
        bad_words_token_ids=(),
        seed=row,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab", "num_logprobs"), [(30, 0), (30, 5), (30, 99), (5001, 7)])
def test_prompt_logprobs_equal_the_log_softmax(dtype, vocab, num_logprobs):
    random = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(130, vocab, generator=random) * 3).to(dtype)
    before = logits.clone()
    targets = torch.randint(0, vocab, (130,), generator=random)
    columns = gather_logprobs(logits, targets, num_logprobs)
    assert torch.equal(logits, before)
    logprobs = logits.float().log_softmax(-1)
    num_best = min(num_logprobs, vocab)
    _, order = logits.float().sort(dim=-1, descending=True, stable=True)
    assert columns.counts == array("i", [num_best + 1] * 130)
    ids = torch.tensor(columns.token_ids).view(130, -1)
    values = torch.tensor(columns.logprobs).view(130, -1)
    assert torch.equal(ids[:, 0], targets.int())
    assert torch.equal(ids[:, 1:], order[:, :num_best].int())
    torch.testing.assert_close(values, logprobs.gather(1, ids.long()), rtol=0, atol=1e-5)
    at_least = (logits >= logits.gather(1, targets[:, None])).sum(-1)
    assert list(columns.ranks) == at_least.tolist()
    assert [x.typecode for x in (columns.counts, columns.token_ids, columns.logprobs)] == list(
        "iif"
    )


def test_logprobs_for_zero_positions_are_empty():
    columns = gather_logprobs(torch.zeros(0, 9), torch.zeros(0, dtype=torch.int64), 3)
    assert len(columns.counts) == len(columns.ranks) == len(columns.logprobs) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sampled_logprobs_are_raw_and_start_with_the_sampled_token(dtype):
    random = torch.Generator().manual_seed(4)
    logits = (torch.randn(4, 50, generator=random) * 2).to(dtype)
    sampler = Sampler(num_rows=8, vocab_size=50, device=HOST)
    worst = int(logits[2].argmin())
    all_settings = [
        {"temperature": 0.0, "logprobs": 0},
        {"temperature": 1.0},
        {"temperature": 0.2, "logprobs": 3, "allowed_token_ids": [worst]},
        {"temperature": 2.0, "top_k": 5, "logprobs": 6, "presence_penalty": 1.0},
    ]
    for row, settings in enumerate(all_settings):
        sampler.join(new_request(row, **settings))
    out = sampler.sample(logits.clone(), [0, 1, 2, 3])
    tokens, expected = out.token_ids.tolist(), logits.float().log_softmax(-1)
    assert sorted(out.logprobs) == [0, 2, 3]
    assert tokens[2] == worst
    for i, columns in out.logprobs.items():
        num_logprobs = all_settings[i]["logprobs"]
        assert list(columns.counts) == [num_logprobs + 1]
        assert columns.token_ids[0] == tokens[i]
        assert list(columns.token_ids[1:]) == expected[i].topk(num_logprobs).indices.tolist()
        values = expected[i][list(columns.token_ids)]
        assert list(columns.logprobs) == pytest.approx(values.tolist(), abs=1e-5)
        assert list(columns.ranks) == [int((expected[i] >= expected[i, tokens[i]]).sum())]
    assert list(out.logprobs[2].ranks) == [50]
    assert list(out.logprobs[0].ranks) == [1]
