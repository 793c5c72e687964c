"""The conformance suite of the scheduler contract, for any scheduler.

`check_scheduler` runs random programs twice each, at depth 1 and 2, with caches that are too small,
with and without prefix caching and chunked prefill (`dovetail_devkit.scheduler.program`), and
checks that invalid requests are rejected. This module needs no model, no executor and no tensor
library.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from dovetail.errors import ConfigError, RequestError
from dovetail.interfaces.policy import Policy
from dovetail.interfaces.scheduler import SchedulerInterface, SchedulerLimits
from dovetail.plan import SchedulerOutput
from dovetail.request import EngineCoreRequest
from dovetail.sampling_params import SamplingParams
from dovetail_devkit.case import Case
from dovetail_devkit.expectation import SkipCase, checking, expect, expect_error
from dovetail_devkit.scheduler.fairness import check_nobody_starves
from dovetail_devkit.scheduler.playing import play
from dovetail_devkit.scheduler.prefixes import BLOCK_SIZE, PREFIX_CHECKS, check_prefixes
from dovetail_devkit.scheduler.program import (
    AfterStep,
    Program,
    SchedulerDriver,
    make_kv_cache,
    random_program,
)

NUM_PROGRAMS = 48
NUM_PROGRAMS_A_CASE = 6
NUM_GROUP_PROGRAMS = 6

Groups = tuple[tuple[int, int], ...]
"""The sliding window (0 for none) and the block size multiple of each KV-cache group."""

PLAIN: Groups = ((0, 1),)
GROUPS: Mapping[str, Groups] = {
    "a window": ((5, 1),),
    "two groups": ((0, 1), (5, 1)),
    "three groups": ((3, 1), (0, 1), (6, 1)),
    "two block sizes": ((0, 2), (5, 1)),
}
"""Map of case name to further KV caches."""

_LIMITS = SchedulerLimits(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=16)


def look_away(scheduler: SchedulerInterface) -> None:
    """The default of `after_step`: do nothing."""


def check_scheduler(
    scheduler_cls: type[SchedulerInterface],
    *,
    policy: type[Policy] | None = None,
    keeps_cache: bool = True,
    keeps_prefixes: bool = False,
    num_programs: int = NUM_PROGRAMS,
    after_step: AfterStep = look_away,
) -> None:
    """Check a scheduler against its contract. Raise AssertionError with the violated rule.

    policy: the policy in the scheduler's context. keeps_cache: whether the model has a KV cache;
    False for schedulers that support only models without a KV cache. keeps_prefixes: True if the
    scheduler must cache prefixes, False if prefix caching is optional. after_step: additional
    checks, which are called with the scheduler after each call.
    """
    for case in scheduler_cases(
        scheduler_cls,
        policy=policy,
        keeps_cache=keeps_cache,
        keeps_prefixes=keeps_prefixes,
        num_programs=num_programs,
        after_step=after_step,
    ):
        with suppress(SkipCase):
            case.run()


def scheduler_cases(
    scheduler_cls: type[SchedulerInterface],
    *,
    policy: type[Policy] | None = None,
    keeps_cache: bool = True,
    keeps_prefixes: bool = False,
    num_programs: int = NUM_PROGRAMS,
    after_step: AfterStep = look_away,
) -> Iterator[Case]:
    """Yield the suite's cases. The arguments are the same as for `check_scheduler`."""

    def judge(check: _Check) -> None:
        with checking(check.__name__):
            check(scheduler_cls, policy, keeps_cache)

    def play_all(seeds: range, groups: Groups = PLAIN) -> None:
        windows, multiples = zip(*groups, strict=True)
        for seed in seeds:
            # The checks of a policy's events do not cover drafts and pauses.
            plain = policy is not None
            program = random_program(
                seed, keeps_cache=keeps_cache, plain=plain, windows=windows, multiples=multiples
            )
            first = check_program(scheduler_cls, program, policy=policy, after_step=after_step)
            again = check_program(scheduler_cls, program, policy=policy, after_step=after_step)
            expect(
                first == again,
                f"the scheduler must return the same plans for the same calls. {program}",
            )

    def play_groups(groups: Groups) -> None:
        windows, multiples = zip(*groups, strict=True)
        program = random_program(0, windows=windows, multiples=multiples)
        try:
            SchedulerDriver(scheduler_cls, program)
        except ConfigError as rejection:
            raise SkipCase(f"the scheduler does not support this KV cache: {rejection}") from None
        play_all(range(NUM_GROUP_PROGRAMS), groups)

    for name, check in _CHECKS.items():
        yield Case(name=name, run=partial(judge, check))
    if keeps_cache:
        make = partial(_prefix_driver, scheduler_cls, policy, after_step)
        for name, prefix_check in PREFIX_CHECKS.items():
            run = partial(check_prefixes, prefix_check, make, are_due=keeps_prefixes)
            yield Case(name=name, run=run)
    if keeps_cache and policy is None:  # a policy has no access to KV-cache groups
        for name, groups in GROUPS.items():
            yield Case(name=name, run=partial(play_groups, groups))
    for first in range(0, num_programs, NUM_PROGRAMS_A_CASE):
        seeds = range(first, min(first + NUM_PROGRAMS_A_CASE, num_programs))
        name = f"programs {seeds[0]} to {seeds[-1]}"
        yield Case(name=name, run=partial(play_all, seeds))


def takes_a_cache(scheduler_cls: type[SchedulerInterface]) -> bool:
    """Return whether a scheduler supports models with a KV cache. It may support only others."""
    try:
        _driver(scheduler_cls, None, keeps_cache=True)
    except ConfigError:
        return False
    return True


def check_program(
    scheduler_cls: type[SchedulerInterface],
    program: Program,
    *,
    policy: type[Policy] | None = None,
    after_step: AfterStep = look_away,
) -> list[SchedulerOutput]:
    """Run one program and return its plans. Raise AssertionError with the violated rule."""
    driver = SchedulerDriver(scheduler_cls, program, policy=policy, after_step=after_step)
    with checking(str(program)):
        return play(program, driver)


def make_request(
    request_id: str, prompt: Sequence[int] = (1, 2, 3), *, max_tokens: int = 4
) -> EngineCoreRequest:
    """Return a simple request of a few tokens."""
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=array("i", prompt),
        sampling_params=SamplingParams(max_tokens=max_tokens),
        max_tokens=max_tokens,
    )


def _driver(
    scheduler_cls: type[SchedulerInterface],
    policy: type[Policy] | None,
    keeps_cache: bool,
    limits: SchedulerLimits = _LIMITS,
    depth: int = 1,
    num_blocks: int = 9,
) -> SchedulerDriver:
    kv_cache = make_kv_cache(num_blocks=num_blocks, block_size=4, keeps=keeps_cache)
    program = Program(seed=0, limits=limits, kv_cache=kv_cache, depth=depth)
    return SchedulerDriver(scheduler_cls, program, policy=policy)


def _prefix_driver(
    scheduler_cls: type[SchedulerInterface],
    policy: type[Policy] | None,
    after_step: AfterStep,
    num_blocks: int,
) -> SchedulerDriver:
    limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=32)
    kv_cache = make_kv_cache(num_blocks=num_blocks, block_size=BLOCK_SIZE)
    program = Program(seed=0, limits=limits, kv_cache=kv_cache, depth=2)
    return SchedulerDriver(scheduler_cls, program, policy=policy, after_step=after_step)


def _check_idle(
    scheduler_cls: type[SchedulerInterface], policy: type[Policy] | None, keeps_cache: bool
) -> None:
    driver = _driver(scheduler_cls, policy, keeps_cache)
    for _ in range(2):
        plan = driver.schedule()
        expect(
            plan.empty and not plan.joins, "a scheduler without requests must return an empty plan"
        )
        outputs = driver.settle()
        expect(
            not outputs.request_ids and not outputs.finished,
            "a scheduler without requests must not return outputs of requests",
        )
    driver.abort([])
    driver.reset()
    driver.add(make_request("a"))
    driver.drain()


def _check_rejections(
    scheduler_cls: type[SchedulerInterface], policy: type[Policy] | None, keeps_cache: bool
) -> None:
    whole = replace(_LIMITS, enable_chunked_prefill=False)
    driver = _driver(scheduler_cls, policy, keeps_cache, limits=whole)
    add = driver.scheduler.add_request
    driver.add(make_request("a"))
    for request, rule in (
        (make_request("a"), "add_request must reject an id that is in use"),
        (make_request("b", ()), "add_request must reject an empty prompt"),
        (make_request("c", range(16)), "add_request must reject a prompt of max_model_len tokens"),
        (
            make_request("d", range(9)),
            "without chunked prefill, add_request must reject a prompt of more than "
            "max_num_batched_tokens",
        ),
    ):
        expect_error(RequestError, partial(add, request), rule)
    driver.add(make_request("e", range(8), max_tokens=100))
    driver.drain()
    driver.add(make_request("a", range(8)))
    driver.drain()
    chunked = replace(_LIMITS, max_num_batched_tokens=32)
    driver = _driver(scheduler_cls, policy, keeps_cache, limits=chunked)
    add = driver.scheduler.add_request
    for prompt, rule in (
        ((), "add_request must reject an empty prompt"),
        (range(16), "add_request must reject a prompt of max_model_len tokens"),
    ):
        expect_error(RequestError, partial(add, make_request("a", prompt)), rule)
    driver.add(make_request("a", range(15), max_tokens=9))
    driver.drain()
    if keeps_cache:
        long = replace(_LIMITS, max_num_batched_tokens=64, max_model_len=64)
        add = _driver(scheduler_cls, policy, keeps_cache, limits=long).scheduler.add_request
        rule = "add_request must reject a prompt that is larger than the KV cache"
        expect_error(RequestError, partial(add, make_request("a", range(33))), rule)


def _check_every_block(
    scheduler_cls: type[SchedulerInterface], policy: type[Policy] | None, keeps_cache: bool
) -> None:
    """Check that a single request can use every block, for its prompt or for its output."""
    for num_prompt in (3, 13):
        kv_cache = make_kv_cache(num_blocks=5, block_size=4, keeps=keeps_cache)
        limits = replace(_LIMITS, max_num_batched_tokens=16)
        program = Program(seed=0, limits=limits, kv_cache=kv_cache)
        driver = SchedulerDriver(scheduler_cls, program, policy=policy)
        driver.add(make_request("a", range(num_prompt), max_tokens=15 - num_prompt))
        driver.drain()
        stats = driver.last_stats
        expect(
            stats is None or not stats.num_preemptions,
            f"the only request, with {num_prompt} prompt tokens, was preempted although it fits "
            "into the KV cache",
        )


def _check_aborts(
    scheduler_cls: type[SchedulerInterface], policy: type[Policy] | None, keeps_cache: bool
) -> None:
    driver = _driver(scheduler_cls, policy, keeps_cache, depth=2)
    for name in "abcd":
        driver.add(make_request(name))
    driver.schedule()
    driver.abort(["a", "d", "a", "nobody"])
    driver.add(make_request("a", (9, 8)))
    driver.schedule()
    driver.settle()
    driver.abort(["b", "d"])
    driver.drain()
    driver.abort(["a", "b", "c", "d"])


def _check_starvation(
    scheduler_cls: type[SchedulerInterface], policy: type[Policy] | None, keeps_cache: bool
) -> None:
    def make(limits: SchedulerLimits) -> SchedulerDriver:
        return _driver(scheduler_cls, policy, keeps_cache, limits, num_blocks=129)

    def add(driver: SchedulerDriver, name: str) -> None:
        driver.add(make_request(name, range(6)))

    check_nobody_starves(make, add)


_Check = Callable[[type[SchedulerInterface], type[Policy] | None, bool], None]

_CHECKS: Mapping[str, _Check] = {
    "idle": _check_idle,
    "invalid requests": _check_rejections,
    "aborts": _check_aborts,
    "every block": _check_every_block,
    "no starvation": _check_starvation,
}
