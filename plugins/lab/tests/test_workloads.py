"""Workloads: the same requests for every policy and every load, at the requested rate."""

import itertools
import math
import statistics
from random import Random

import pytest
from pydantic import ValidationError

from dovetail.errors import UserError
from dovetail_lab.workloads.building import BURST, build_workload
from dovetail_lab.workloads.presets import PRESETS
from dovetail_lab.workloads.spec import (
    ArrivalSpec,
    Component,
    SessionSpec,
    SLOClass,
    WorkloadSpec,
)
from dovetail_lab.workloads.synthetic import sample_length

NS = 1_000_000_000


def build(spec=None, *, rate=2.0, seed=0, num_seeds=4, max_model_len=16384, **fields):
    spec = spec or WorkloadSpec(**{"num_requests": 400, **fields})
    return build_workload(
        spec, rate=rate, seed=seed, num_seeds=num_seeds, max_model_len=max_model_len
    )


def requests(*args, **options):
    return build(*args, **options).workload.requests


def mean_rate(workload):
    return (len(workload) - 1) * NS / (workload[-1].arrival_ns - workload[0].arrival_ns)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_gives_valid_requests(name):
    created = requests(synthetic=name)
    seen = set()
    for request in created:
        assert request.num_prompt_tokens >= 1 and request.num_output_tokens >= 1
        assert request.num_prompt_tokens + request.max_tokens <= 16384
        assert request.num_output_tokens <= request.max_tokens
        assert not request.parent or request.parent in seen
        assert len(request.prefix_hashes) in (0, -(-request.num_prompt_tokens // 512))
        seen.add(request.request_id)
    assert len(seen) == 400
    assert [item.arrival_ns for item in created] == sorted(item.arrival_ns for item in created)


@pytest.mark.parametrize("fields", [{"trace": "azure:conv"}, {"synthetic": "conversations"}])
def test_the_load_changes_only_the_arrival_times(fields):
    slow, fast = (requests(rate=rate, **fields) for rate in (1.0, 4.0))
    hidden = ("arrival_ns",)
    for left, right in zip(slow, fast, strict=True):
        for name in left.__slots__:
            assert name in hidden or getattr(left, name) == getattr(right, name)
    assert slow[-1].arrival_ns == pytest.approx(4 * fast[-1].arrival_ns, rel=1e-6)


def test_a_workload_depends_only_on_its_description_and_seed():
    item, same, other = (build(synthetic="chat", seed=seed).workload for seed in (3, 3, 4))
    assert item == same
    assert item.fingerprint != other.fingerprint and item.requests != other.requests
    assert build(synthetic="chat", seed=3, rate=2.5).workload.fingerprint != item.fingerprint


def test_a_trace_keeps_the_shape_of_its_arrivals_at_any_rate():
    first, second = (requests(trace="azure:code", rate=rate) for rate in (0.5, 5.0))
    assert mean_rate(first) == pytest.approx(0.5) and mean_rate(second) == pytest.approx(5.0)
    gaps = [b.arrival_ns - a.arrival_ns for a, b in itertools.pairwise(first)]
    assert statistics.pstdev(gaps) > 1.2 * statistics.mean(gaps)


def test_seeds_use_different_rows_and_report_when_rows_overlap():
    left, right = (build(trace="azure:conv", seed=seed) for seed in (0, 1))
    assert not left.overlap
    assert left.workload.requests[-1] != right.workload.requests[-1]
    assert build(trace="mooncake:synthetic", num_requests=3000, num_seeds=3).overlap


def lengths_cv(process, rate=2.0, **options):
    spec = ArrivalSpec(process=process, **options)
    created = requests(synthetic="chat", num_requests=4000, rate=rate, arrivals=spec)
    gaps = [(b.arrival_ns - a.arrival_ns) / NS for a, b in itertools.pairwise(created)]
    return mean_rate(created), statistics.pstdev(gaps) / statistics.mean(gaps)


def test_arrival_processes_have_the_requested_rate_and_burstiness():
    rate, cv = lengths_cv("poisson")
    assert rate == pytest.approx(2.0, rel=0.06) and cv == pytest.approx(1.0, rel=0.06)
    rate, cv = lengths_cv("gamma", burstiness=0.25)
    assert rate == pytest.approx(2.0, rel=0.1) and cv == pytest.approx(2.0, rel=0.1)
    rate, cv = lengths_cv("on_off", on_s=5, off_s=15)
    assert rate == pytest.approx(2.0, rel=0.25) and cv > 2.0
    rate, cv = lengths_cv("diurnal", period_s=100, amplitude=1.0)
    assert rate == pytest.approx(2.0, rel=0.1)


def test_diurnal_arrivals_are_denser_in_the_first_half_of_a_period():
    spec = ArrivalSpec(process="diurnal", period_s=100, amplitude=1.0)
    created = requests(synthetic="chat", num_requests=4000, arrivals=spec)
    first_half = sum(item.arrival_ns % (100 * NS) < 50 * NS for item in created)
    assert first_half > 0.7 * len(created)


def test_the_requests_of_a_burst_arrive_at_once_without_think_time():
    created = requests(synthetic="conversations", rate=BURST)
    assert {(item.arrival_ns, item.think_ns) for item in created} == {(0, 0)}


def test_sessions_have_think_time_and_growing_prompts():
    spec = SessionSpec(turns=5, think_s=3.0, think_cv=0.0, system_tokens=1024)
    created = requests(sessions=spec, num_requests=2000, rate=5.0)
    by_id = {item.request_id: item for item in created}
    turns = [item for item in created if item.parent]
    assert len(turns) / len(created) == pytest.approx(0.8, abs=0.04)
    for item in turns:
        parent = by_id[item.parent]
        assert item.num_prompt_tokens > parent.num_prompt_tokens + parent.num_output_tokens
        assert item.session == parent.session and item.think_ns == 3 * NS and not item.prefix_hashes
    starts = [item for item in created if not item.parent]
    assert len({item.prefix_hashes[:2] for item in starts}) == 1
    assert len({item.prefix_hashes[2] for item in starts if len(item.prefix_hashes) > 2}) > 100


def test_the_rate_of_sessions_counts_all_of_their_requests():
    created = requests(sessions=SessionSpec(turns=4), num_requests=4000, rate=8.0)
    starts = [item.arrival_ns for item in created if not item.parent]
    assert len(created) / (max(starts) / NS) == pytest.approx(8.0, rel=0.12)


def test_a_turn_of_a_trace_waits_for_the_turn_before_it(tmp_path):
    path = tmp_path / "burst.csv"
    header = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens\n"
    path.write_text(header + "0,7,1,m,10,5\n1,,1,m,10,5\n2,7,1,m,40,5\n3,7,1,m,12,5\n")
    created = requests(trace=str(path), num_requests=4, num_seeds=1)
    assert [item.parent for item in created if item.session == "7"] == ["", "r0", ""]


def test_mix_shares_and_lengths_match_the_specification():
    mix = (
        Component(name="a", share=3, prompt_tokens=100, prompt_cv=0.5, output_tokens=10),
        Component(name="b", share=1, prompt_tokens=4000, prompt_cv=0, tenant="big", priority=2),
    )
    created = requests(mix=mix, num_requests=4000)
    big = [item for item in created if item.tenant == "big"]
    assert len(big) == pytest.approx(1000, rel=0.1)
    assert {item.num_prompt_tokens for item in big} == {4000} and {
        item.priority for item in big
    } == {2}
    small = [item.num_prompt_tokens for item in created if not item.tenant]
    assert statistics.mean(small) == pytest.approx(100, rel=0.05)
    assert statistics.pstdev(small) == pytest.approx(50, rel=0.1)


def test_requests_of_a_group_share_only_their_prefix():
    mix = (Component(name="g", prompt_tokens=3000, prefix_groups=2, prefix_tokens=1500),)
    created = requests(mix=mix)
    assert len({item.prefix_hashes[:2] for item in created}) == 2
    assert len({item.prefix_hashes[2] for item in created}) == len(created)


def test_tenants_follow_a_zipf_distribution():
    created = requests(synthetic="chat", num_requests=4000, tenants=3, tenant_skew=1.0)
    counts = [sum(item.tenant == f"tenant {number}" for item in created) for number in range(3)]
    assert counts[0] == pytest.approx(4000 * 6 / 11, rel=0.1)
    assert counts[0] > 1.7 * counts[1] > 1.7 * counts[2] > 0


def test_classes_set_objectives_and_priorities_per_session():
    classes = (
        SLOClass(name="chat", share=1, ttft_ms=500, tpot_ms=50, priority=-1),
        SLOClass(name="batch", share=3),
    )
    created = requests(synthetic="conversations", num_requests=2000, slo_classes=classes)
    chat = [item for item in created if item.slo_class == "chat"]
    assert 0.15 < len(chat) / len(created) < 0.35
    assert {(item.ttft_slo_ns, item.tpot_slo_ns, item.priority) for item in chat} == {
        (500_000_000, 50_000_000, -1)
    }
    by_session = {}
    for item in created:
        assert by_session.setdefault(item.session, item.slo_class) == item.slo_class


@pytest.mark.parametrize("kind", ["none", "exact", "noisy:0.5"])
def test_estimates_of_the_output_length_have_the_specified_error(kind):
    created = requests(synthetic="chat", num_requests=2000, expected_tokens=kind)
    errors = [math.log(max(1, item.expected_tokens) / item.num_output_tokens) for item in created]
    if kind == "none":
        assert {item.expected_tokens for item in created} == {0}
    elif kind == "exact":
        assert set(errors) == {0.0}
    else:
        assert 0.4 < statistics.pstdev(errors) < 0.6


def test_the_limit_that_policies_see_does_not_reveal_the_output_length():
    assert len({item.max_tokens for item in requests(trace="azure:conv")}) == 1


def test_requests_that_are_too_long_are_clipped_or_dropped_and_counted():
    clipped = build(trace="azure:code", max_model_len=2048)
    assert clipped.num_clipped > 50 and len(clipped.workload.requests) == 400
    longest = max(r.num_prompt_tokens + r.num_output_tokens for r in clipped.workload.requests)
    assert longest == 2048
    dropped = build(trace="azure:code", max_model_len=2048, too_long="drop")
    assert dropped.num_dropped == clipped.num_clipped
    assert len(dropped.workload.requests) == 400 - dropped.num_dropped
    with pytest.raises(UserError, match="longer than max_model_len=4"):
        build(trace="azure:code", max_model_len=4, too_long="drop")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "exactly one"),
        ({"trace": "azure:conv", "synthetic": "chat"}, "got trace and synthetic"),
        ({"synthetic": "chat", "num_requests": 0}, "num_requests"),
        ({"synthetic": "chat", "arrivals": {"process": "trace"}}, "needs a trace"),
        ({"synthetic": "chat", "arrivals": {"burstiness": -1}}, "burstiness"),
        ({"synthetic": "chat", "tenant_skew": float("nan")}, "tenant_skew"),
        ({"synthetic": "chat", "slo_classes": [{"name": "a"}, {"name": "a"}]}, "not unique"),
        ({"synthetic": "chat", "expected_tokens": "oracle"}, "expected_tokens"),
        ({"mix": [{"name": "a", "share": 0}]}, "share"),
        ({"mix": [{"name": "a", "share": 1e308}]}, "share"),
        ({"mix": [{"name": "a", "prompt_cv": 1e300}]}, "prompt_cv"),
        ({"mix": [{"name": "a", "priority": 2**63}]}, "priority"),
        ({"sessions": {"think_s": 1e300}}, "think_s"),
        ({"synthetic": "chat", "tenant_skew": 1e308}, "tenant_skew"),
        ({"synthetic": "chat", "slo_classes": [{"ttft_ms": 1e300}]}, "ttft_ms"),
        ({"synthetic": "chat", "expected_tokens": "noisy:1.2.3"}, "SIGMA from 0 to 10"),
        ({"synthetic": "chat", "expected_tokens": "noisy:9999"}, "SIGMA from 0 to 10"),
        ({"synthetic": "chat", "expected_tokens": "noisy:nan"}, "SIGMA from 0 to 10"),
        ({"trace": "azure:conv", "first_row": 2**63}, "first_row"),
        ({"synthetic": "chat", "load": 3}, "load"),
    ],
)
def test_an_invalid_description_is_rejected(fields, message):
    with pytest.raises(ValidationError, match=message):
        WorkloadSpec(**fields)


def test_sampled_lengths_are_bounded():
    lengths = [sample_length(10_000_000, 100.0, Random(seed)) for seed in range(200)]
    assert max(lengths) == 10_000_000 and min(lengths) >= 1


def test_impossible_workloads_are_rejected():
    with pytest.raises(UserError, match="synthetic='chatt' is not one of"):
        build(synthetic="chatt")
    with pytest.raises(UserError, match="has 8,819 rows"):
        build(trace="azure:code", num_requests=9000)
    for rate in (0.0, -1.0, float("nan")):
        with pytest.raises(UserError, match="must be positive"):
            build(synthetic="chat", rate=rate)
