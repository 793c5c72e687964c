"""The workloads of `lab profile`, and the steps that they contain."""

import pytest
from lab_builders import TIMES, Recorded, setup

from dovetail_lab.simulation.engine import RunLimits
from dovetail_lab.step_times.design import design


@pytest.mark.parametrize(
    ("limits", "num_tokens"),
    [
        ({"max_num_seqs": 16}, 9600),
        ({"max_num_seqs": 32}, 16384),
        ({"max_num_seqs": 32}, 4096),
        ({"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 48}, 96),
        ({"max_num_seqs": 1, "max_num_batched_tokens": 1, "max_model_len": 2}, 16),
        ({"max_num_seqs": 300, "max_num_batched_tokens": 300, "max_model_len": 4000}, 10**5),
    ],
)
def test_the_requests_of_the_grid_fit_the_model_and_the_cache(limits, num_tokens):
    limits = setup(**{"max_model_len": 512} | limits).limits
    for item in design(limits, num_tokens, 0):
        for each in item.requests:
            assert each.num_prompt_tokens >= 1 and each.num_output_tokens >= 1
            assert each.num_prompt_tokens + each.num_output_tokens <= limits.max_model_len
        total = sum(each.num_prompt_tokens + each.num_output_tokens for each in item.requests)
        assert total <= num_tokens or "decodes" not in item.name


def test_the_grid_has_full_batches_of_the_longest_contexts_and_every_batch_size():
    created = setup(max_num_seqs=16, max_model_len=512)
    longest, rows = 0, set()
    for item in design(created.limits, 9600, 0):
        if "decodes" not in item.name:
            continue
        engine = Recorded(item.requests, created, TIMES, macro_steps=False)
        assert not engine.run(RunLimits()).error
        for _, starts, num_tokens, *_ in engine.plans.values():
            if set(num_tokens) == {1}:
                rows.add(len(starts))
                longest = max(longest, sum(starts) * (len(starts) == 16))
    assert rows >= set(range(1, 17))
    assert longest > 0.9 * 16 * 512
