"""The simulator makes the decisions of the engine, even if it skips stretches of steps."""

import pytest
from lab_builders import TIMES, Recorded, random_workload, request, setup, workload

from dovetail.clock import MonotonicClock
from dovetail.decision_log import LogReader
from dovetail_lab.replay import replay_log
from dovetail_lab.simulation.engine import MAX_IDLE_STEPS, RunLimits
from dovetail_lab.simulation.results import NEVER
from dovetail_lab.simulation.setup import EngineSetup
from dovetail_lab.simulation.simulate import simulate

POLICIES = (
    "fcfs", "priority", "static", "orca", "prefill_first", "sarathi", "sjf", "srpt", "hrrn",
    "edf", "vtc", "lpm", "dlpm", "mlfq",
)  # fmt: skip


@pytest.mark.costly
@pytest.mark.sampled(20)
@pytest.mark.parametrize("num_blocks", [130, 600])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_skipping_decode_steps_changes_no_plan_and_no_time(policy, caching, num_blocks):
    for seed in range(3):
        load = random_workload(seed, mean_gap_ns=(10**6, 3 * 10**7, 3 * 10**8)[seed])
        created = setup(policy, num_blocks=num_blocks, enable_prefix_caching=caching)
        runs = [
            Recorded(load.requests, created, TIMES, macro_steps=macro_steps)
            for macro_steps in (False, True)
        ]
        every, skipping = (run.run(RunLimits()) for run in runs)
        assert not every.error and skipping.requests == every.requests
        assert skipping.num_steps == every.num_steps == len(runs[0].plans)
        assert skipping.num_request_steps == every.num_request_steps
        assert skipping.end_ns == every.end_ns
        assert all(runs[0].plans[step] == plan for step, plan in runs[1].plans.items())
        if policy in ("fcfs", "sjf", "priority") and seed == 2:
            assert len(runs[1].plans) < len(runs[0].plans) / 2, "almost nothing was skipped"


def test_every_request_gets_its_output_length_and_policies_see_only_the_limit():
    lengths = [1, 2, 17, 200]
    load = workload(*(request(n, num_output_tokens=size) for n, size in enumerate(lengths)))
    result = simulate(load, setup(), TIMES)
    assert list(result.requests.num_output_tokens) == lengths
    assert NEVER not in result.requests.finished_ns

    longer = workload(*(request(n, num_output_tokens=199) for n in range(4)))
    runs = [
        Recorded(item.requests, setup("sjf"), TIMES, macro_steps=False) for item in (load, longer)
    ]
    for run in runs:
        run.run(RunLimits())
    assert runs[0].plans[0] == runs[1].plans[0], "the first plan depends on hidden lengths"


def test_equal_prefixes_and_conversations_are_found_in_the_prefix_cache():
    load = workload(
        request(0, num_prompt_tokens=1100, prefix_hashes=(7, 8)),
        request(1, num_prompt_tokens=1100, prefix_hashes=(7, 9), arrival_ns=10**10),
        request(2, num_prompt_tokens=1100, prefix_hashes=(9, 8), arrival_ns=2 * 10**10),
        request(3, num_prompt_tokens=100, num_output_tokens=60, arrival_ns=3 * 10**10),
        request(4, num_prompt_tokens=200, parent="r3", think_ns=5, arrival_ns=0),
    )
    cached = simulate(load, setup(), TIMES).requests.num_cached_tokens
    assert list(cached) == [0, 512, 0, 0, 144]  # 159 of 160 tokens have keys and values


def test_a_follow_up_request_arrives_after_its_parent_and_the_think_time():
    load = workload(request(0), request(1, parent="r0", think_ns=10**9), request(2, parent="r1"))
    columns = simulate(load, setup(), TIMES).requests
    assert columns.arrival_ns[1] == columns.finished_ns[0] + 10**9
    assert columns.arrival_ns[2] == columns.finished_ns[1]


def test_steps_overlap_with_the_host_at_depth_2_and_the_outputs_are_the_same():
    load = random_workload(5)
    one, two = (simulate(load, setup(depth=depth), TIMES) for depth in (1, 2))
    assert one.requests.num_output_tokens == two.requests.num_output_tokens
    assert not one.error and not two.error and NEVER not in two.requests.finished_ns


def test_a_rejected_request_fails_and_others_are_not_affected():
    innocent = [request(n, arrival_ns=n * 10**7) for n in range(5)]
    alone = simulate(workload(*innocent), setup(), TIMES).requests
    hostile = request(9, arrival_ns=10**7, num_prompt_tokens=5000)
    mixed = [*innocent[:2], hostile, *innocent[2:]]
    columns = simulate(workload(*mixed), setup(), TIMES).requests
    assert list(columns.failed) == [0, 0, 1, 0, 0, 0] and columns.num_output_tokens[2] == 0
    kept = [n for n in range(6) if n != 2]
    assert [columns.last_token_ns[n] for n in kept] == list(alone.last_token_ns)


def test_the_step_columns_sum_to_the_totals_of_the_run():
    load = random_workload(3)
    for macro_steps in (False, True):
        result = simulate(load, setup(), TIMES, macro_steps=macro_steps)
        steps = result.steps
        assert sum(steps.num_steps) == result.num_steps
        outputs = sum(result.requests.num_output_tokens)
        firsts = len(load.requests) + result.num_preemptions
        assert outputs - firsts <= sum(steps.num_decode_tokens) <= outputs
        assert steps.start_ns[-1] + steps.duration_ns[-1] == result.end_ns


def test_a_failing_policy_ends_the_run_with_its_error(tmp_path):
    file = tmp_path / "bad.py"
    file.write_text(
        "from dovetail.interfaces import Policy\n"
        "class Bad(Policy):\n"
        "    static_rank = False\n"
        "    def rank(self, request, view):\n"
        "        if view.step_id > 3: raise KeyError('lost')\n"
        "        return 0\n"
    )
    created = EngineSetup(
        scheduler=f"{file}:Bad", limits=setup().limits, num_blocks=600, trust_local_code=True
    )
    result = simulate(random_workload(1), created, TIMES)
    assert "KeyError" in result.error and "lost" in result.error


def test_a_policy_that_schedules_no_request_ends_the_simulation(tmp_path):
    file = tmp_path / "lazy.py"
    file.write_text(
        "from dovetail.interfaces import Policy\n"
        "class Lazy(Policy):\n"
        "    work_conserving = False\n"
        "    def plan(self, view):\n"
        "        return\n"
        "        yield\n"
    )
    created = EngineSetup(
        scheduler=f"{file}:Lazy", limits=setup().limits, num_blocks=600, trust_local_code=True
    )
    result = simulate(workload(request(0)), created, TIMES)
    assert f"scheduled no request in {MAX_IDLE_STEPS} consecutive steps" in result.error
    assert list(result.requests.finished_ns) == [NEVER]


def test_the_error_of_a_failed_policy_is_kept_even_if_its_shutdown_fails(tmp_path):
    file = tmp_path / "bad.py"
    file.write_text(
        "from dovetail.scheduling import Scheduler\n"
        "class Bad(Scheduler):\n"
        "    def schedule(self): raise ValueError('first')\n"
        "    def shutdown(self): raise KeyError('second')\n"
    )
    created = EngineSetup(
        scheduler=f"{file}:Bad", limits=setup().limits, num_blocks=600, trust_local_code=True
    )
    assert "first" in simulate(workload(request(0)), created, TIMES).error


def test_the_time_of_the_scheduler_is_measured():
    result = simulate(random_workload(1), setup(), TIMES)
    assert 1_000 < result.scheduler_ns < 50_000_000


def test_a_run_ends_at_its_limits_of_steps_and_time():
    load = random_workload(1)
    assert "limit of 5 steps" in simulate(load, setup(), TIMES, limits=RunLimits(num_steps=5)).error
    assert "time limit" in simulate(load, setup(), TIMES, limits=RunLimits(time_s=0.0)).error


def test_the_decision_log_of_a_simulated_run_can_be_replayed(tmp_path):
    log = tmp_path / "run.log"
    result = simulate(random_workload(2), setup("hrrn", num_blocks=130), TIMES, decision_log=log)
    assert result.num_preemptions
    replay = replay_log(LogReader(log), clock=MonotonicClock())
    assert replay.difference is None and replay.num_steps == result.num_steps
