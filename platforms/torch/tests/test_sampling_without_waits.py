"""Sampling on asynchronous devices gives the same tokens without waiting."""

from array import array

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dovetail.plan import NewRequest
from dovetail.sampling_params import SamplingParams
from dovetail_torch.sampling import Sampler, truncation
from dovetail_torch.sampling.device_access import DeviceAccess, plain_access

HOST, V = torch.device("cpu"), 3000
ASKING = {
    torch.ops.aten.nonzero.default,
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.masked_select.default,
}
SETTINGS = [
    {"temperature": 1.0, "top_p": 0.4},
    {"temperature": 1.0, "top_p": 0.999, "min_p": 0.0001},
    {"temperature": 2.0, "top_k": 2000},
    {"temperature": 0.9, "top_k": 7, "top_p": 0.8},
    {"temperature": 1.0},
    {"temperature": 0, "logprobs": 3},
    {"temperature": 1.0, "top_p": 0.7, "repetition_penalty": 1.2, "logprobs": 0},
]


class RejectsHostReads(TorchDispatchMode):
    """Raises an error for operations that return a value or a shape to the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        by_mask = func is torch.ops.aten.index.Tensor and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        assert func not in ASKING and not by_mask, f"{func} makes the host wait"
        return func(*args, **(kwargs or {}))


def new_sampler(access=None):
    sampler = Sampler(num_rows=len(SETTINGS), vocab_size=V, device=HOST, access=access)
    for row, settings in enumerate(SETTINGS):
        sampler.join(
            NewRequest(
                request_id=str(row),
                row=row,
                generation=1,
                token_ids=array("i", [5, 6, 7]),
                num_prompt_tokens=3,
                sampling_params=SamplingParams(**settings),
                stop_token_ids=frozenset(),
                bad_words_token_ids=(),
                seed=row,
            )
        )
    return sampler


@pytest.mark.parametrize("at_once", [truncation._SORTED_AT_ONCE, 2 * V])
def test_tokens_are_the_same_without_blocking_calls(at_once, monkeypatch):
    monkeypatch.setattr(truncation, "_SORTED_AT_ONCE", at_once)
    generator = torch.Generator().manual_seed(3)
    plain = new_sampler()
    other = new_sampler(DeviceAccess(upload=plain_access(HOST).upload, may_wait=False))
    for step in range(6):
        rows = [row for row in range(len(SETTINGS)) if row != step]
        logits_SV = 2 * torch.randn(len(rows), V, generator=generator)
        logits_SV[0, 1::2] = logits_SV[0, ::2]  # many logits are equal
        expected = plain.sample(logits_SV.clone(), rows)
        with RejectsHostReads():
            actual = other.sample(logits_SV.clone(), rows)
        assert torch.equal(actual.token_ids, expected.token_ids)
        assert actual.logprobs == expected.logprobs


def test_a_blocking_call_is_detected():
    logits_SV = torch.randn(1, V, generator=torch.Generator().manual_seed(1))
    with pytest.raises(AssertionError, match="wait"), RejectsHostReads():
        new_sampler().sample(logits_SV, [1])


def test_random_numbers_may_be_sent_to_the_device_before_sampling():
    plain, other = new_sampler(), new_sampler()
    rows = list(range(len(SETTINGS)))
    logits_SV = torch.randn(len(rows), V, generator=torch.Generator().manual_seed(2))
    (uniforms_S,) = other.host_numbers(rows)
    assert len(uniforms_S) == len(rows)
    actual = other.sample(logits_SV.clone(), rows, None, [torch.from_numpy(uniforms_S)])
    assert torch.equal(actual.token_ids, plain.sample(logits_SV.clone(), rows).token_ids)
    assert plain.host_numbers([5]) == ()
