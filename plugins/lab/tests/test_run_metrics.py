"""Metrics of runs, compared with values that were computed manually."""

from array import array

import pytest

from dovetail_lab.experiments.fairness import jain_index, max_service_gap, service_curves
from dovetail_lab.experiments.ideal_cache import ideal_hits
from dovetail_lab.experiments.metric_table import MAIN_METRICS, METRICS
from dovetail_lab.experiments.run_metrics import Cut, measure_run
from dovetail_lab.simulation.results import NEVER, RequestColumns, RunResult, StepColumns
from dovetail_lab.workloads.workload import WorkloadRequest

NS = 1_000_000_000
ALL = Cut(warmup=0.0, drain=0.0)


def request(number, **fields):
    values = {
        "arrival_ns": number * NS,
        "num_prompt_tokens": 10,
        "num_output_tokens": 5,
        "max_tokens": 16,
        **fields,
    }
    return WorkloadRequest(request_id=f"r{number}", **values)


def columns(rows):
    """Return columns from rows of (arrival, admitted, first token, end) in seconds."""
    table = RequestColumns()
    for arrival, admitted, first, end, *rest in rows:
        extra = {"num_output_tokens": 5, "max_gap_ns": NS // 2, **(rest[0] if rest else {})}
        times = [t if t == NEVER else round(t * NS) for t in (arrival, admitted, first, end)]
        table.arrival_ns.append(times[0])
        table.admitted_ns.append(times[1])
        table.first_token_ns.append(times[2])
        table.last_token_ns.append(times[3])
        table.finished_ns.append(times[3])
        for name in (
            "num_output_tokens",
            "max_gap_ns",
            "num_cached_tokens",
            "num_preemptions",
            "num_recomputed_tokens",
            "failed",
        ):
            getattr(table, name).append(extra.get(name, 0))
    return table


def result(table, steps=None, **fields):
    values = {
        "num_steps": 10,
        "num_request_steps": 20,
        "end_ns": 100 * NS,
        "host_ns": 1,
        "scheduler_ns": 0,
        "num_blocks": 100,
        "max_num_batched_tokens": 64,
        **fields,
    }
    return RunResult(requests=table, steps=steps, **values)


def measure(rows, requests=None, cut=ALL, **fields):
    table = columns(rows)
    requests = requests or [request(number) for number in range(len(rows))]
    return measure_run(result(table, **fields), requests, cut, 16)


def test_latencies_follow_their_definitions():
    match = measure([(0, 1, 2, 6), (1, 2, 5, 7)]).values
    assert match["ttft_mean"] == pytest.approx(3.0)
    assert match["tpot_mean"] == pytest.approx((4 / 4 + 2 / 4) / 2)
    assert match["e2e_mean"] == pytest.approx(6.0) and match["e2e_p50"] == pytest.approx(6.0)
    assert match["norm_latency"] == pytest.approx(6 / 5)
    assert match["gap_mean"] == pytest.approx(0.5)
    assert match["wait_mean"] == pytest.approx(1.0)
    assert match["starvation_age"] == pytest.approx(1.0)


def test_a_request_with_one_token_has_no_time_per_output_token():
    match = measure([(0, 0, 1, 1, {"num_output_tokens": 1}), (0, 0, 1, 5)]).values
    assert match["tpot_mean"] == pytest.approx(1.0) and match["gap_p50"] == pytest.approx(0.5)


def test_unfinished_requests_are_counted_and_never_dropped_from_means():
    match = measure([(0, 0, 1, 2), (0, 0, 1, NEVER), (0, NEVER, NEVER, NEVER)])
    assert match.num_censored == 2 and match.num_measured == 3
    assert match.values["e2e_mean"] is None and match.values["e2e_p50"] is None
    assert match.values["ttft_mean"] is None and match.values["ttft_p50"] == pytest.approx(1.0)
    assert match.values["starvation_age"] == pytest.approx(100.0)


def test_failed_requests_are_counted():
    match = measure([(0, 0, 1, 2), (0, NEVER, NEVER, NEVER, {"failed": 1})])
    assert match.num_failed == 1 and match.num_censored == 0
    assert match.values["e2e_mean"] == pytest.approx(2.0)


def test_a_99th_percentile_needs_enough_requests():
    rows = [(0, 0, 1 + number / 1000, 2 + number) for number in range(1000)]
    assert measure(rows).values["ttft_p99"] == pytest.approx(1.98901)
    assert measure(rows[:999]).values["ttft_p99"] is None
    assert measure(rows[:999]).values["ttft_p90"] is not None


def test_warm_up_and_drain_are_not_measured():
    rows = [(n, n, n + (50 if n in (0, 9) else 1), n + 60) for n in range(10)]
    match = measure(rows, cut=Cut(warmup=0.1, drain=0.1))
    assert match.num_measured == 8 and match.values["ttft_mean"] == pytest.approx(1.0)
    assert measure(rows).values["ttft_mean"] > 10


def test_goodput_and_attainment_need_every_objective():
    slow_start = {"ttft_slo_ns": NS, "tpot_slo_ns": NS, "slo_class": "chat"}
    requests = [request(n, **slow_start) for n in range(4)] + [request(4, slo_class="free")]
    rows = [
        (0, 0, 1, 5),  # meets both
        (1, 1, 3, 5),  # first token too late
        (2, 2, 3, 8),  # too slow
        (3, 3, 4, NEVER),
        (4, 4, 90, 91),  # no objective
    ]
    match = measure(rows, requests)
    assert match.values["slo_attainment"] == pytest.approx(0.25)
    assert match.values["goodput"] == pytest.approx(1 / 4)
    assert match.classes["chat"] == {
        "requests": 4.0,
        "slo_attainment": 0.25,
        "goodput": pytest.approx(0.25),
    }
    assert match.classes["free"]["slo_attainment"] == 1.0
    assert measure(rows).values["goodput"] is None


def test_throughput_counts_the_tokens_between_the_first_and_the_last_arrival():
    match = measure([(0, 0, 0, 10, {"num_output_tokens": 20}), (5, 20, 20, 30)]).values
    assert match["throughput"] == pytest.approx(10 / 5)


def test_preemptions_and_recomputed_tokens_and_cache_hits_of_measured_requests_are_counted():
    rows = [
        (0, 0, 1, 2, {"num_preemptions": 3, "num_recomputed_tokens": 30}),
        (0, 0, 1, 2, {"num_cached_tokens": 8}),
    ]
    match = measure(rows).values
    assert match["preemptions"] == 1.5 and match["hit_rate"] == pytest.approx(8 / 20)
    assert match["recompute_share"] == pytest.approx(30 / (30 + 15 + 7))


def test_step_metrics_are_weighted_by_time():
    steps = StepColumns(
        start_ns=array("q", [0, NS, 50 * NS]),
        duration_ns=array("q", [NS, 3 * NS, NS]),
        num_steps=array("q", [1, 3, 1]),
        num_prefill_tokens=array("q", [64, 0, 0]),
        num_decode_tokens=array("q", [0, 64, 0]),
        num_running=array("q", [1, 1, 0]),
        num_waiting=array("q", [0, 0, 0]),
        num_used_blocks=array("q", [40, 80, 0]),
    )
    rows = [(0, 0, 1, 2), (1, 1, 2, 3)]
    match = measure(rows, steps=steps, scheduler_ns=5_000).values
    assert match["cache_usage"] == pytest.approx((40 + 3 * 80) / 4 / 100)
    assert match["budget_fill"] == pytest.approx(128 / (4 * 64))
    assert match["scheduler_us"] == pytest.approx(5.0)


def test_an_infinite_cache_hits_shared_prefixes_and_previous_turns():
    requests = [
        request(0, num_prompt_tokens=1030, prefix_hashes=(1, 2, 3)),
        request(1, num_prompt_tokens=1024, prefix_hashes=(1, 2)),
        request(2, num_prompt_tokens=600, prefix_hashes=(9, 2)),
        request(3, num_prompt_tokens=2000, num_output_tokens=50, parent="r1"),
        request(4, num_prompt_tokens=20, parent="r3"),
    ]
    assert ideal_hits(requests, 16) == [0, 1008, 0, 1024, 16]


def curves_of(rows, tenants, end_s):
    table = columns(rows)
    return service_curves(table, tenants, [10] * len(rows), start_ns=0, end_ns=round(end_s * NS))


def test_service_is_counted_at_the_first_token_and_while_the_output_is_generated():
    curves = curves_of([(0, 0, 10, 20)], ["a"], 20)
    assert curves.service["a"][99] == 0 and curves.service["a"][100] == 10
    assert curves.service["a"][150] == pytest.approx(15)
    assert curves.service["a"][-1] == pytest.approx(10 + 2 * 5)


def test_the_service_difference_counts_only_while_both_tenants_wait():
    served = [(0, 0, 10, 20), (0, NEVER, NEVER, NEVER), (0, 20, NEVER, NEVER)]
    unfair = curves_of(served, ["a", "b", "a"], 20)
    assert max_service_gap(unfair) == pytest.approx(20, rel=0.05)
    assert jain_index(unfair) == pytest.approx(0.5)
    alone = curves_of(served[:2], ["a", "b"], 20)
    assert max_service_gap(alone) is None
    both = [(0, 0, 10, 20), (0, 0, 10, 20), (0, 20, NEVER, NEVER), (0, 20, NEVER, NEVER)]
    fair = curves_of(both, ["a", "b", "a", "b"], 20)
    assert max_service_gap(fair) == pytest.approx(0) and jain_index(fair) == pytest.approx(1.0)


def test_every_computed_metric_is_in_the_table():
    rows = [(0, 0, 1, 2), (1, 1, 2, 3)]
    assert set(measure(rows).values) == set(METRICS)
    assert set(MAIN_METRICS) <= set(METRICS)
