"""The simulator makes the same decisions as the real engine if it uses the recorded times.

The decision logs of both runs are equal byte for byte: every plan, every result and every time.
"""

from functools import cache
from itertools import product

import pytest

from dovetail.errors import ConfigError, UserError
from dovetail.interfaces import SchedulerLimits
from dovetail_lab.real_engine.engine import RealEngine
from dovetail_lab.simulation.results import NEVER
from dovetail_lab.simulation.setup import EngineSetup
from dovetail_lab.simulation.simulate import simulate
from dovetail_lab.simulation.step_times import LinearStepTimes
from dovetail_lab.step_times.recorded import repeat_run
from dovetail_lab.workloads.building import build_workload
from dovetail_lab.workloads.spec import WorkloadSpec

POLICIES = (
    "fcfs", "priority", "static", "orca", "prefill_first", "sarathi", "sjf", "srpt", "hrrn",
    "edf", "vtc", "lpm", "dlpm", "mlfq", "on_time",
)  # fmt: skip
SOURCES = {
    "azure:conv": {"trace": "azure:conv"},
    "mooncake:synthetic": {"trace": "mooncake:synthetic"},
    "conversations": {"synthetic": "conversations"},
}
NUM_BLOCKS = {"ample": 300, "scarce": 24}
"""With 24 blocks of 16 tokens running requests are preempted."""
MAX_MODEL_LEN = 192
TIMES = LinearStepTimes(
    name="test", step_ps=10**9, prefill_token_ps=10**7, decode_ps=10**7, kv_token_ps=10**4
)


def make_setup(scheduler="fcfs", *, num_blocks=300, depth=1, caching=True, **limits):
    return EngineSetup(
        scheduler=scheduler,
        limits=SchedulerLimits(
            **{
                "max_num_seqs": 8,
                "max_num_batched_tokens": 64,
                "max_model_len": MAX_MODEL_LEN,
                "enable_prefix_caching": caching,
                **limits,
            }
        ),
        num_blocks=num_blocks,
        depth=depth,
    )


@cache
def workload(source, num_requests=12, rate=300.0):
    """Return requests of a source, cut to the length of the engine."""
    spec = WorkloadSpec(
        **SOURCES[source], num_requests=num_requests, tenants=2, expected_tokens="noisy:0.5",
        max_tokens=32,
    )  # fmt: skip
    built = build_workload(spec, rate=rate, seed=0, num_seeds=1, max_model_len=MAX_MODEL_LEN)
    return built.workload


@pytest.fixture(scope="module", params=[1, 2], ids=["depth1", "depth2"])
def engine(request):
    with RealEngine("demo", make_setup(depth=request.param)) as started:
        yield started


def run_twice(engine, source, setup, folder):
    """Run on the engine and repeat it in the simulator. Return both results and both logs."""
    logs = folder / "real.log", folder / "repeated.log"
    real = engine.run(workload(source), setup, decision_log=logs[0])
    assert not real.error
    repeated = repeat_run(workload(source), setup, logs[0], decision_log=logs[1])
    assert not repeated.error
    return real, repeated, *(log.read_bytes() for log in logs)


CASES = [*product(POLICIES, SOURCES, NUM_BLOCKS, (True, False))]


@pytest.mark.costly
@pytest.mark.sampled(240)
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("policy", "source", "blocks", "caching"), CASES)
def test_the_simulator_repeats_a_run_of_the_engine_byte_for_byte(
    engine, policy, source, blocks, caching, tmp_path
):
    setup = make_setup(
        policy, num_blocks=NUM_BLOCKS[blocks], depth=engine.largest.depth, caching=caching
    )
    real, repeated, first, second = run_twice(engine, source, setup, tmp_path)
    assert first == second and len(first) > 500
    assert real.requests == repeated.requests
    assert NEVER not in real.requests.finished_ns or any(real.requests.failed)


@pytest.mark.costly
def test_the_engine_and_the_simulator_preempt_requests_if_blocks_are_scarce(engine, tmp_path):
    setup = make_setup(num_blocks=NUM_BLOCKS["scarce"], depth=engine.largest.depth)
    real, repeated, *_ = run_twice(engine, "azure:conv", setup, tmp_path)
    assert real.num_preemptions == repeated.num_preemptions > 0


@pytest.mark.costly
def test_different_step_times_give_a_different_log(engine, tmp_path):
    setup = make_setup(depth=engine.largest.depth)
    *_, first, _ = run_twice(engine, "azure:conv", setup, tmp_path)
    other = tmp_path / "other.log"
    simulate(workload("azure:conv"), setup, TIMES, decision_log=other)
    assert other.read_bytes() != first


@pytest.mark.costly
def test_repeating_a_run_with_another_policy_gives_an_error_or_a_different_log(engine, tmp_path):
    setup = make_setup(depth=engine.largest.depth)
    *_, first, _ = run_twice(engine, "azure:conv", setup, tmp_path)
    other = make_setup("sjf", depth=engine.largest.depth)
    log = tmp_path / "other.log"
    result = repeat_run(workload("azure:conv"), other, tmp_path / "real.log", decision_log=log)
    assert result.error or log.read_bytes() != first


def test_a_setup_above_the_engines_maximum_is_rejected(engine):
    for name, fields in (
        ("num_blocks", {"num_blocks": 999}),
        ("max_num_seqs", {"max_num_seqs": 99}),
        ("depth", {"depth": 3 - engine.largest.depth}),
    ):
        setup = make_setup(**{"depth": engine.largest.depth, **fields})
        with pytest.raises(ConfigError, match=name):
            engine.run(workload("azure:conv"), setup)


def test_a_file_that_is_not_a_log_is_rejected(tmp_path):
    file = tmp_path / "run.log"
    file.write_bytes(b"not a log")
    with pytest.raises(UserError, match=r"run\.log"):
        repeat_run(workload("azure:conv"), make_setup(), file)
