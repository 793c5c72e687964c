"""Builds the workloads and engines of the tests of the simulator."""

import random

from dovetail.interfaces import SchedulerLimits
from dovetail_lab.simulation.engine import SimulatedEngine
from dovetail_lab.simulation.setup import EngineSetup
from dovetail_lab.simulation.step_times import LinearStepTimes
from dovetail_lab.workloads.workload import Workload, WorkloadRequest

TIMES = LinearStepTimes(
    name="test",
    step_ps=8_000_000_000,
    prefill_token_ps=60_000_300,
    decode_ps=40_000_700,
    kv_token_ps=30_011,
)


def request(number, **fields):
    defaults = {
        "request_id": f"r{number}",
        "arrival_ns": 0,
        "num_prompt_tokens": 40,
        "num_output_tokens": 20,
        "max_tokens": 200,
    }
    return WorkloadRequest(**(defaults | fields))


def workload(*requests):
    return Workload(name="test", requests=requests, fingerprint="test")


def random_workload(seed, num_requests=60, mean_gap_ns=30_000_000):
    """Return requests of random lengths: some share prefixes, some continue a conversation."""
    rng = random.Random(seed)
    requests, time_ns = [], 0
    for number in range(num_requests):
        time_ns += round(rng.expovariate(1 / mean_gap_ns))
        fields = {}
        if number and rng.random() < 0.2:
            parent = rng.choice(requests)
            fields = {"parent": parent.request_id, "think_ns": rng.randrange(10**8)}
        elif rng.random() < 0.3:
            fields = {"prefix_hashes": tuple(range(rng.randint(1, 3)))}
        requests.append(
            request(
                number,
                arrival_ns=time_ns,
                num_prompt_tokens=rng.randint(1, 700),
                num_output_tokens=rng.choice([1, 2, rng.randint(3, 150)]),
                tenant=rng.choice("ab"),
                priority=rng.randrange(3),
                ttft_slo_ns=rng.choice([0, 10**9]),
                **fields,
            )
        )
    return workload(*requests)


def setup(scheduler="fcfs", *, num_blocks=600, depth=1, max_num_seqs=16, **limits):
    return EngineSetup(
        scheduler=scheduler,
        limits=SchedulerLimits(
            max_num_seqs=max_num_seqs,
            **{"max_num_batched_tokens": 256, "max_model_len": 2000, **limits},
        ),
        num_blocks=num_blocks,
        depth=depth,
    )


class Recorded(SimulatedEngine):
    """A simulated engine that keeps the plans of all steps that are not skipped, by step."""

    def __init__(self, *arguments, macro_steps):
        super().__init__(*arguments)
        self.macro_steps = macro_steps
        self.plans = {}

    def on_step(self, plan, start_ns, end_ns):
        super().on_step(plan, start_ns, end_ns)
        blocks = [(list(b.rows), list(b.counts), list(b.block_ids)) for b in plan.blocks]
        joins = [(new.request_id, new.row, list(new.token_ids)) for new in plan.joins]
        self.plans[plan.step_id] = (
            list(plan.rows), list(plan.starts), list(plan.num_tokens), list(plan.samples),
            list(plan.leaves), blocks, joins, start_ns, end_ns,
        )  # fmt: skip
