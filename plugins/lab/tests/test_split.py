"""Separate replicas for prefill and decode: each request runs on one of each kind."""

import pytest
from lab_builders import TIMES, random_workload, request, setup, workload

from dovetail.errors import UserError
from dovetail_lab.replicas.routers import LeastLoad, RoundRobin
from dovetail_lab.replicas.split import simulate_split
from dovetail_lab.replicas.transfers import TransferCost
from dovetail_lab.simulation.engine import RunLimits
from dovetail_lab.simulation.results import NEVER
from dovetail_lab.simulation.simulate import simulate

FREE = TransferCost(latency_ns=0, ps_per_token=0)


def split(arrivals, num_prefill=1, num_decode=1, *, cost=FREE, **fields):
    return simulate_split(
        arrivals,
        [setup(**fields)] * num_prefill,
        [setup(**fields)] * num_decode,
        TIMES,
        (LeastLoad(), LeastLoad()),
        cost=cost,
    )


def test_every_request_gets_its_output_on_one_prefill_and_one_decode_replica():
    arrivals = random_workload(5)
    result = split(arrivals, 2, 2)
    assert not result.error
    lengths = [item.num_output_tokens for item in arrivals.requests]
    assert list(result.requests.num_output_tokens) == lengths
    assert NEVER not in result.requests.finished_ns
    prefill, decode = result.replicas[:2], result.replicas[2:]
    assert sum(max(entry.requests.num_output_tokens) for entry in prefill) == 2
    longer = sum(length > 1 for length in lengths)
    arrived = [t for replica in decode for t in replica.requests.arrival_ns if t != NEVER]
    assert len(arrived) == longer < len(lengths)


def test_a_decode_replica_computes_only_the_partial_last_block_of_the_prompt():
    result = split(workload(request(0, num_prompt_tokens=100)))
    decode = result.replicas[1]
    assert sum(decode.steps.num_prefill_tokens) == 100 % 16 + 1
    assert decode.requests.num_cached_tokens[0] == 96


def test_a_single_request_waits_for_its_transfer():
    arrivals = workload(request(0, num_prompt_tokens=160))
    fast = split(arrivals).requests
    slow = split(arrivals, cost=TransferCost(latency_ns=3_000_000_000, ps_per_token=10**10))
    extra_ns = slow.requests.max_gap_ns[0] - fast.max_gap_ns[0]
    expected_ns = 3_000_000_000 + 160 * 10**7
    assert expected_ns <= extra_ns < 1.05 * expected_ns
    assert slow.requests.first_token_ns[0] == fast.first_token_ns[0]


def test_transfers_to_a_replica_share_its_link():
    arrivals = workload(*[request(n, num_prompt_tokens=160) for n in range(4)])
    cost = TransferCost(latency_ns=10**9, ps_per_token=0)
    item, four = split(arrivals, cost=cost), split(arrivals, 1, 4, cost=cost)
    first = sorted(item.requests.max_gap_ns)
    assert first[-1] > 3.9e9 and first[0] < 1.5e9
    assert max(four.requests.max_gap_ns) < 1.5e9


def test_decode_is_not_delayed_by_prefills_of_other_requests():
    long = [request(n, num_prompt_tokens=1900, arrival_ns=n * 10**8) for n in range(1, 12)]
    arrivals = workload(request(0, num_output_tokens=100), *long)
    together = simulate(arrivals, setup(), TIMES).requests.max_gap_ns[0]
    assert split(arrivals, 1, 1).requests.max_gap_ns[0] < 0.7 * together


def test_skipping_decode_steps_changes_no_result(monkeypatch):
    requests = [request(n, arrival_ns=n * 3 * 10**7, num_output_tokens=9 + n) for n in range(40)]
    cost = TransferCost()
    skipping = split(workload(*requests), 2, 2, cost=cost)
    monkeypatch.setattr("dovetail_lab.simulation.engine.SimulatedEngine._skip_decoding", bool)
    every = split(workload(*requests), 2, 2, cost=cost)
    assert skipping.requests == every.requests


def test_conversations_continue_after_their_last_decode():
    parent = request(0, num_prompt_tokens=320)
    child = request(1, num_prompt_tokens=400, parent="r0", think_ns=10**9)
    result = split(workload(parent, child)).requests
    assert result.arrival_ns[1] == result.finished_ns[0] + 10**9
    assert result.num_cached_tokens[1] == 320


def test_a_full_decode_replica_recomputes_evicted_blocks(monkeypatch):
    monkeypatch.setattr("dovetail_lab.replicas.transfers.MAX_STORED_BLOCKS", 3)
    result = split(workload(request(0, num_prompt_tokens=160)))
    assert not result.error and result.requests.num_output_tokens[0] == 20
    assert sum(result.replicas[1].steps.num_prefill_tokens) == 161


def test_rejected_requests_do_not_reach_the_decode_replicas():
    arrivals = workload(request(0, num_prompt_tokens=5000), request(1), request(2))
    result = split(arrivals)
    assert list(result.requests.failed) == [1, 0, 0]
    assert result.requests.num_output_tokens[0] == 0
    assert list(result.requests.num_output_tokens)[1:] == [20, 20]
    assert result.replicas[1].requests.arrival_ns[0] == NEVER


def test_a_pool_without_replicas_or_prefix_cache_is_rejected():
    arrivals = workload(request(0))
    with pytest.raises(UserError, match="decode is empty"):
        split(arrivals, 1, 0)
    with pytest.raises(UserError, match="prefill: enable_prefix_caching is False"):
        split(arrivals, enable_prefix_caching=False)


def test_a_run_ends_at_its_limits():
    arrivals = random_workload(1)
    result = simulate_split(
        arrivals,
        [setup()],
        [setup()],
        TIMES,
        (RoundRobin(), RoundRobin()),
        limits=RunLimits(num_steps=5),
    )
    assert "limit of 5 steps" in result.error
