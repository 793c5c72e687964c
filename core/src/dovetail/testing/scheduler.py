"""The conformance suite of the scheduler contract, for any scheduler.

`check_scheduler` plays random programs, at depth 1 and 2, over caches that are too small, with and
without prefix caching and chunked prefill (`dovetail.testing.scheduler_program`), each twice, and
tries what has to be refused. Needs no model, no executor and no tensor library.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from dovetail.errors import RequestError
from dovetail.interfaces.policy import Policy
from dovetail.interfaces.scheduler import SchedulerInterface, SchedulerLimits
from dovetail.plan import SchedulerOutput
from dovetail.request import EngineCoreRequest
from dovetail.sampling_params import SamplingParams
from dovetail.testing.expectation import expect, expect_error, judging
from dovetail.testing.scheduler_program import (
    AfterStep,
    Program,
    Referee,
    make_kv_cache,
    play,
    random_program,
)

NUM_PROGRAMS = 60

_LIMITS = SchedulerLimits(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=16)


def _look_away(scheduler: SchedulerInterface) -> None:
    """Look no deeper than the contract."""


def check_scheduler(
    scheduler_cls: type[SchedulerInterface],
    *,
    policy: type[Policy] | None = None,
    keeps_cache: bool = True,
    num_programs: int = NUM_PROGRAMS,
    after_step: AfterStep = _look_away,
) -> None:
    """Check a scheduler against its whole contract; raise AssertionError with the law broken.

    policy: given to it in its context. keeps_cache: whether the model keeps a KV cache; False for
    schedulers that serve only models that do not. after_step: called with the scheduler after each
    call, for checks of its own.
    """
    for check in (_check_idle, _check_refusals, _check_aborts):
        with judging(f"in {check.__name__}"):
            check(scheduler_cls, policy, keeps_cache)
    for seed in range(num_programs):
        program = random_program(seed, keeps_cache=keeps_cache)
        first = check_program(scheduler_cls, program, policy=policy, after_step=after_step)
        again = check_program(scheduler_cls, program, policy=policy, after_step=after_step)
        expect(first == again, f"{program}: the same calls give other plans the second time")


def check_program(
    scheduler_cls: type[SchedulerInterface],
    program: Program,
    *,
    policy: type[Policy] | None = None,
    after_step: AfterStep = _look_away,
) -> list[SchedulerOutput]:
    """Play one program and return its plans; raise AssertionError with program and law."""
    referee = Referee(scheduler_cls, program, policy=policy, after_step=after_step)
    with judging(f"in {program}"):
        return play(program, referee)


def make_request(
    request_id: str, prompt: Sequence[int] = (1, 2, 3), *, max_tokens: int = 4
) -> EngineCoreRequest:
    """Return a plain request of a few tokens."""
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=array("i", prompt),
        sampling_params=SamplingParams(max_tokens=max_tokens),
        max_tokens=max_tokens,
    )


def _referee(
    scheduler_cls: type[SchedulerInterface],
    policy: type[Policy] | None,
    keeps_cache: bool,
    limits: SchedulerLimits = _LIMITS,
    depth: int = 1,
) -> Referee:
    kv_cache = make_kv_cache(num_blocks=9, block_size=4, keeps=keeps_cache)
    program = Program(seed=0, limits=limits, kv_cache=kv_cache, depth=depth)
    return Referee(scheduler_cls, program, policy=policy)


def _check_idle(
    scheduler_cls: type[SchedulerInterface], policy: type[Policy] | None, keeps_cache: bool
) -> None:
    referee = _referee(scheduler_cls, policy, keeps_cache)
    for _ in range(2):
        plan = referee.schedule()
        expect(plan.empty and not plan.joins, "an idle scheduler must plan an empty step")
        outputs = referee.settle()
        expect(not outputs.request_ids and not outputs.finished, "there is news of nobody")
    referee.abort([])
    referee.reset()
    referee.add(make_request("a"))
    referee.drain()


def _check_refusals(
    scheduler_cls: type[SchedulerInterface], policy: type[Policy] | None, keeps_cache: bool
) -> None:
    whole = replace(_LIMITS, enable_chunked_prefill=False)
    referee = _referee(scheduler_cls, policy, keeps_cache, limits=whole)
    add = referee.scheduler.add_request
    referee.add(make_request("a"))
    for request, law in (
        (make_request("a"), "an id in use is refused"),
        (make_request("b", ()), "an empty prompt is refused"),
        (make_request("c", range(16)), "a prompt that leaves no room for a token is refused"),
        (make_request("d", range(9)), "without chunks a prompt over the budget is refused"),
    ):
        expect_error(RequestError, partial(add, request), law)
    referee.add(make_request("e", range(8), max_tokens=100))
    referee.drain()
    referee.add(make_request("a", range(8)))
    referee.drain()


def _check_aborts(
    scheduler_cls: type[SchedulerInterface], policy: type[Policy] | None, keeps_cache: bool
) -> None:
    referee = _referee(scheduler_cls, policy, keeps_cache, depth=2)
    for name in "abcd":
        referee.add(make_request(name))
    referee.schedule()
    referee.abort(["a", "d", "a", "nobody"])
    referee.add(make_request("a", (9, 8)))
    referee.schedule()
    referee.settle()
    referee.abort(["b", "d"])
    referee.drain()
    referee.abort(["a", "b", "c", "d"])
