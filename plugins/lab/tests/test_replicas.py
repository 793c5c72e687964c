"""Several replicas behind a router: each request runs on one of them."""

import pytest
from lab_builders import TIMES, Recorded, random_workload, request, setup, workload

from dovetail.errors import PluginError, UserError
from dovetail_lab.replicas.cluster import simulate_replicas
from dovetail_lab.replicas.routers import (
    LOAD_SLACK,
    ROUTERS,
    ArrivingRequest,
    LeastLoad,
    ReplicaLoad,
    load_router,
)
from dovetail_lab.simulation.engine import RunLimits
from dovetail_lab.simulation.results import NEVER
from dovetail_lab.simulation.simulate import simulate
from dovetail_lab.workloads.workload import WorkloadRequest


def load(num_unfinished, num_prompt_tokens=0):
    return ReplicaLoad(
        num_waiting=0,
        num_running=num_unfinished,
        num_unfinished=num_unfinished,
        num_prompt_tokens=num_prompt_tokens,
    )


@pytest.mark.costly
@pytest.mark.parametrize("router", ROUTERS)
def test_one_replica_gives_the_result_of_one_engine(router):
    for seed in range(2):
        arrivals = random_workload(seed)
        alone = simulate(arrivals, setup(num_blocks=130), TIMES)
        cluster = simulate_replicas(arrivals, [setup(num_blocks=130)], TIMES, load_router(router))
        assert cluster.requests == alone.requests and not cluster.error
        assert cluster.end_ns == alone.end_ns


@pytest.mark.costly
@pytest.mark.parametrize("router", ROUTERS)
def test_every_request_runs_on_exactly_one_replica(router):
    arrivals = random_workload(7, num_requests=120, mean_gap_ns=4 * 10**6)
    result = simulate_replicas(arrivals, [setup()] * 3, TIMES, load_router(router))
    lengths = [item.num_output_tokens for item in arrivals.requests]
    assert list(result.requests.num_output_tokens) == lengths
    assert NEVER not in result.requests.finished_ns
    for index, replica in enumerate(result.replicas):
        ran = [n for n, arrival in enumerate(replica.requests.arrival_ns) if arrival != NEVER]
        assert ran == [n for n, chosen in enumerate(result.replica_of) if chosen == index]
    if router != "session":
        assert set(result.replica_of) == {0, 1, 2}


def test_skipping_decode_steps_changes_no_result_of_a_cluster(monkeypatch):
    requests = [request(n, arrival_ns=n * 3 * 10**7, num_output_tokens=9 + n) for n in range(40)]
    arrivals = workload(*requests)
    skipping = simulate_replicas(arrivals, [setup()] * 2, TIMES, LeastLoad())
    monkeypatch.setattr("dovetail_lab.simulation.engine.SimulatedEngine._skip_decoding", bool)
    every = simulate_replicas(arrivals, [setup()] * 2, TIMES, LeastLoad())
    assert skipping.requests == every.requests and skipping.replica_of == every.replica_of


def test_two_replicas_are_faster_than_one():
    arrivals = workload(*[request(n, num_output_tokens=60) for n in range(80)])
    ends = [
        simulate_replicas(arrivals, [setup()] * count, TIMES, LeastLoad()).end_ns
        for count in (1, 2)
    ]
    assert ends[1] < 0.75 * ends[0]


def test_the_prefix_router_finds_more_cached_tokens_than_round_robin():
    requests = [
        request(n, arrival_ns=n * 10**8, num_prompt_tokens=600, prefix_hashes=(n % 3,))
        for n in range(30)
    ]
    cached = {
        name: sum(
            simulate_replicas(
                workload(*requests), [setup()] * 2, TIMES, load_router(name)
            ).requests.num_cached_tokens
        )
        for name in ("round_robin", "prefix")
    }
    assert cached["prefix"] == 27 * 512 and cached["round_robin"] == 24 * 512


def test_the_prefix_router_avoids_a_replica_with_a_much_higher_load():
    router = load_router("prefix")
    arriving = ArrivingRequest.of(request(0, num_prompt_tokens=600, prefix_hashes=(5,)))
    assert router.choose(arriving, [load(0), load(0)]) == 0
    assert router.choose(arriving, [load(LOAD_SLACK), load(0)]) == 0
    assert router.choose(arriving, [load(LOAD_SLACK + 1), load(0)]) == 1


def test_sessions_stay_on_one_replica():
    requests = [request(n, session=f"s{n % 5}", arrival_ns=n * 10**7) for n in range(40)]
    result = simulate_replicas(workload(*requests), [setup()] * 4, TIMES, load_router("session"))
    homes = {(item.session, index) for item, index in zip(requests, result.replica_of, strict=True)}
    assert len(homes) == 5


def test_routers_do_not_see_output_lengths():
    assert not hasattr(ArrivingRequest.of(request(0)), "num_output_tokens")
    assert hasattr(WorkloadRequest, "num_output_tokens")


def test_a_rejected_request_does_not_count_as_load():
    hostile = [request(f"h{n}", num_prompt_tokens=5000, arrival_ns=n) for n in range(6)]
    innocent = [request(n, arrival_ns=10**7 * (n + 1)) for n in range(4)]
    result = simulate_replicas(workload(*hostile, *innocent), [setup()] * 2, TIMES, LeastLoad())
    assert list(result.requests.failed) == [1] * 6 + [0] * 4
    assert set(result.replica_of[6:]) == {0, 1}


def test_the_run_of_a_cluster_ends_at_its_limits():
    arrivals = random_workload(1)
    limits = RunLimits(num_steps=4)
    result = simulate_replicas(arrivals, [setup()] * 2, TIMES, LeastLoad(), limits=limits)
    assert "limit of 4 steps" in result.error


def test_invalid_routers_and_clusters_raise_errors(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from dovetail_lab.replicas.routers import Router\n"
        "class Mine(Router):\n"
        "    def choose(self, request, replicas): return len(replicas)\n"
        "class Other: pass\n"
    )
    with pytest.raises(
        UserError, match=r"router='round_robn' is unknown; use round_robin.* Did you mean 'round_ro"
    ):
        load_router("round_robn")
    with pytest.raises(UserError, match="--trust-local-code"):
        load_router(f"{file}:Mine")
    with pytest.raises(UserError, match="not a subclass of Router"):
        load_router(f"{file}:Other", trust_local_code=True)
    with pytest.raises(PluginError):
        load_router(f"{file}:Missing", trust_local_code=True)
    with pytest.raises(UserError, match="setups is empty"):
        simulate_replicas(workload(request(0)), [], TIMES, LeastLoad())
    mine = load_router(f"{file}:Mine", trust_local_code=True)
    result = simulate_replicas(workload(request(0)), [setup()] * 2, TIMES, mine)
    assert "The router returned 2 for request 'r0'" in result.error
    assert list(result.requests.finished_ns) == [NEVER]


def test_a_replica_makes_the_same_plans_as_an_engine_with_the_same_arrivals():
    requests = [request(n, arrival_ns=n * 10**6, num_output_tokens=30) for n in range(20)]
    result = simulate_replicas(
        workload(*requests), [setup()] * 2, TIMES, load_router("round_robin")
    )
    even = Recorded(requests[::2], setup(), TIMES, macro_steps=True).run(RunLimits())
    assert list(result.requests.last_token_ns)[::2] == list(even.requests.last_token_ns)
