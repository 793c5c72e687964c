"""A decode step submits one graph and a limited number of operations to an asynchronous device."""

import pytest
from device_step import TARGETS_MS, Submitted, count_submitted, measure

MAX_LAUNCHES = 24
SLACK = 4
"""Tests may run on slow machines. `python bench/device_step.py` compares with the targets."""


def test_a_decode_step_submits_one_graph_and_few_operations():
    submitted = count_submitted(2)
    assert submitted.graphs == 1
    assert 0 < submitted.launches <= MAX_LAUNCHES
    assert submitted.views > 0


@pytest.mark.clock
def test_the_host_time_is_the_sum_of_engine_runner_and_launches():
    result = measure(2, Submitted(launches=20, views=9, graphs=1))
    parts = [result[name] for name in ("engine_ms", "runner_ms", "launch_ms")]
    assert result["launch_ms"] == pytest.approx(0.105)
    assert all(part > 0 for part in parts) and result["host_ms"] == pytest.approx(sum(parts))


@pytest.mark.clock
@pytest.mark.parametrize("num_requests", TARGETS_MS)
def test_the_host_time_of_a_decode_step_is_below_a_multiple_of_its_target(num_requests):
    result = measure(num_requests, count_submitted(2))
    assert result["host_ms"] <= SLACK * TARGETS_MS[num_requests], result
