"""The criteria of `bench/lab_validation.py`, and how it writes its page."""

import lab_validation
import pytest
from lab_tiers import latencies, policies


@pytest.mark.parametrize(
    ("simulated", "real", "reached"),
    [
        (1.04, [1.0, 1.0, 1.0], True),
        (1.06, [1.0, 1.0, 1.0], False),
        (0.94, [1.0, 1.0, 1.0], False),
        (1.15, [0.9, 1.0, 1.1], True),
        (1.25, [0.9, 1.0, 1.1], False),
    ],
)
def test_a_latency_passes_if_its_error_is_within_the_limit_or_the_spread_of_the_real_runs(
    simulated, real, reached
):
    table = latencies.new_table()
    cells = latencies._judge(table, real, simulated, 0.05)
    assert (table.judged, table.passed) == (1, int(reached))
    assert cells[2] == f"{simulated - 1:+.1%}"


def test_only_pairs_of_policies_that_differ_in_real_runs_are_counted():
    names = dict(zip(policies.POLICIES, (1.0, 2.0, 2.0, 2.0, 2.0), strict=True))
    real = {
        name: [{"ttft_mean": mean + seed / 100} for seed in range(4)]
        for name, mean in names.items()
    }
    table = policies.new_table()
    assert policies._judge(table, "ttft_mean", real, real) == ["10", "4", "4", "1.00", "yes"]
    swapped = {**real, "fcfs": [{"ttft_mean": 3.0}] * 4}
    cells = policies._judge(table, "ttft_mean", real, swapped)
    assert cells == ["10", "4", "0", "-1.00", "**no**"]
    assert (table.judged, table.passed) == (2, 1)


def test_updating_the_page_replaces_only_its_tables():
    page = "before\n<!-- recorded: T3 -->\nold\n<!-- end -->\nafter\n"
    stored = {
        "T3": {
            "columns": ["a", "b"], "rows": [["1", "2"]], "passed": 1, "judged": 2,
            "load": [0.5, 1.0], "machine": "M", "num_threads": 2, "created": "D", "commit": "C",
        }
    }  # fmt: skip
    new = lab_validation.page_with(page, stored)
    assert "old" not in new and new.startswith("before\n") and new.endswith("\nafter\n")
    assert "| 1 | 2 |" in new and "1 of 2 passed" in new and "2 threads" in new
    assert lab_validation.page_with(new, stored) == new
