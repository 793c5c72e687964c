"""Checks that a policy's decisions do not depend on future tokens.

The same requests run twice. From a given step on, the requests get different tokens in the second
run, and therefore outputs of different lengths. Up to this step, the plans must be equal. This
module uses only the contract of the scheduler.
"""

from __future__ import annotations

from array import array
from random import Random

from dovetail.clock import ManualClock
from dovetail.interfaces.policy import Policy
from dovetail.interfaces.scheduler import SchedulerContext, SchedulerInterface, SchedulerLimits
from dovetail.plan import SchedulerOutput
from dovetail.request import EngineCoreRequest
from dovetail.result import ModelRunnerOutput
from dovetail.sampling_params import SamplingParams
from dovetail_devkit.expectation import expect
from dovetail_devkit.rows.state import mix
from dovetail_devkit.scheduler.program import STEP_NS, make_kv_cache

NUM_STEPS = 40
SPLITS = (4, 11, 25)
NUM_SEEDS = 4
STOP = 0
_LIMITS = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=12, max_model_len=48)


def check_foresight(scheduler_cls: type[SchedulerInterface], policy: type[Policy]) -> None:
    """Compare the plans of two runs. Raise AssertionError with the first difference."""
    for seed in range(NUM_SEEDS):
        for split in SPLITS:
            plans, others = (
                _play(scheduler_cls, policy, seed=seed, split=split, variant=variant)
                for variant in (1, 2)
            )
            for plan, other in zip(plans[: split + 1], others[: split + 1], strict=True):
                expect(
                    plan == other,
                    f"the plans depend on future tokens: two runs with equal tokens before step "
                    f"{split} have different plans before it: {plan.describe()}\n"
                    f"and\n{other.describe()}",
                )


def _play(
    scheduler_cls: type[SchedulerInterface],
    policy: type[Policy],
    *,
    seed: int,
    split: int,
    variant: int,
) -> list[SchedulerOutput]:
    """Return the plans of `NUM_STEPS` steps. From step `split` on, tokens depend on `variant`."""
    clock, rng = ManualClock(), Random(seed)
    scheduler = scheduler_cls(
        SchedulerContext(
            limits=_LIMITS,
            kv_cache=make_kv_cache(num_blocks=22, block_size=4),
            clock=clock,
            policy=policy,
            seed=seed,
            strict=True,
        )
    )
    plans: list[SchedulerOutput] = []
    for step in range(NUM_STEPS):
        if rng.random() < 0.6:
            scheduler.add_request(_random_request(rng, f"r{step}"))
        if rng.random() < 0.1:
            scheduler.abort_requests([f"r{rng.randrange(step + 1)}"])
        clock.advance(STEP_NS)
        plan = scheduler.schedule()
        plans.append(plan)
        scheduler.update_from_output(plan, _sample(plan, variant if step >= split else 0))
    scheduler.shutdown()
    return plans


def _random_request(rng: Random, request_id: str) -> EngineCoreRequest:
    num_prompt, max_tokens = rng.randint(1, 16), rng.randint(1, 24)
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=array("i", [rng.randrange(1, 5) for _ in range(num_prompt)]),
        sampling_params=SamplingParams(max_tokens=max_tokens),
        max_tokens=max_tokens,
        stop_token_ids=frozenset({STOP}),
        priority=rng.randint(-2, 2),
        tenant=rng.choice("ab"),
    )


def _sample(plan: SchedulerOutput, variant: int) -> ModelRunnerOutput:
    """Return tokens by (variant, row, position). One in eight tokens is a stop token."""
    runs = zip(plan.rows, plan.starts, plan.num_tokens, plan.samples, strict=True)
    token_ids = [mix(mix(variant, row), start + n) % 8 for row, start, n, item in runs if item]
    return ModelRunnerOutput(
        step_id=plan.step_id, num_sampled=plan.samples, token_ids=array("i", token_ids)
    )
