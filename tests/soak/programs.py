"""Random sequences of scheduler calls ("programs"), with every policy and every cache shape.

The number of a program determines all its calls. `SchedulerDriver`, a part of the scheduler suite,
runs the program and checks every rule in every step. Every 20 steps and at the end,
`check_integrity` is also called.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from dovetail.interfaces import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    NoCacheSpec,
    PauseScope,
    Policy,
    SchedulerInterface,
    SchedulerLimits,
    SchedulerStats,
    StateSpec,
)
from dovetail.plugins import PluginRegistry
from dovetail.scheduling import Scheduler
from dovetail_devkit.expectation import checking
from dovetail_devkit.scheduler.program import SchedulerDriver
from dovetail_devkit.scheduler.random_programs import Program, random_request

CHECK_EVERY = 20
OPTIONS: dict[str, tuple[dict[str, Any], ...]] = {
    "dlpm": ({}, {"quantum": 3.0}),
    "edf": ({}, {"preempt": False}),
    "hrrn": ({}, {"predictor": "bucketed:2"}),
    "lpm": ({}, {"max_wait_s": 0.003}),
    "mlfq": ({}, {"max_batch": 24, "quantum": 1, "promote_s": 0.02}),
    "on_time": ({}, {"step_ms": 1.0}),
    "sarathi": ({}, {"chunk": 40}),
    "sjf": ({}, {"predictor": "noisy:1"}),
    "srpt": ({}, {"hysteresis": 1.0}),
    "vtc": ({}, {"weights": {"a": 3.0}}),
}
"""The options of each policy that is tested with several settings."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A cache shape.

    windows: the sliding window of each attention group, 0 for full attention. states: for each
    state group, whether it keeps snapshots. share: number of blocks relative to the need of all
    batch slots.
    """

    name: str
    windows: tuple[int, ...] = (0,)
    states: tuple[bool, ...] = ()
    share: float = 0.7

    def specs(self, block_size: int) -> list[KVCacheSpec]:
        """Return one KV-cache spec for each group."""
        collected: list[KVCacheSpec] = [
            FullAttentionSpec(
                block_size=block_size,
                num_kv_heads=1,
                head_size=1,
                dtype="float32",
                sliding_window=window,
            )
            for window in self.windows
        ]
        collected += [
            StateSpec(block_size=block_size, num_bytes=8, snapshots=keeps) for keeps in self.states
        ]
        return collected or [NoCacheSpec(block_size=block_size)]


SHAPES = (
    Shape(name="full"),
    Shape(name="roomy", share=1.5),
    Shape(name="tiny", share=0.0),
    Shape(name="window", windows=(7,)),
    Shape(name="full and window", windows=(0, 5)),
    Shape(name="full, window and snapshots", windows=(0, 9), states=(True,)),
    Shape(name="full and state", states=(False,)),
    Shape(name="nothing kept", windows=()),
)


@dataclass(frozen=True, kw_only=True)
class LongProgram:
    """A program to run.

    policy: a name, "" for the scheduler's own policy. num_steps: number of steps, after which all
    requests run to completion. num_alive: number of requests that the program tries to keep
    alive.
    """

    program: Program
    policy: str
    options: dict[str, Any]
    shape: Shape
    num_alive: int
    num_steps: int

    def __str__(self) -> str:
        return f"program {self.program.seed}: {self.policy} {self.options}, {self.program}"


@dataclass(slots=True)
class Tally:
    """Counts of events and steps. counts: events by kind. by_policy, by_shape: numbers of steps."""

    counts: Counter[str] = field(default_factory=Counter)
    by_policy: Counter[str] = field(default_factory=Counter)
    by_shape: Counter[str] = field(default_factory=Counter)

    def add(self, other: Tally) -> None:
        """Add the counts of another tally."""
        self.counts += other.counts
        self.by_policy += other.by_policy
        self.by_shape += other.by_shape


def policy_names() -> list[str]:
    """Return the names of all installed policies."""
    return [candidates.name for candidates in PluginRegistry().candidates("policy")]


def make_program(
    number: int, policies: list[str], *, num_steps: int, max_batch_slots: int = 64
) -> LongProgram:
    """Return program `number`: consecutive numbers cover every pair of policy and shape."""
    rng = Random(f"soak {number}")
    policy, shape = policies[number % len(policies)], SHAPES[number // len(policies) % len(SHAPES)]
    chunked, max_model_len = rng.random() < 0.75, rng.choice((32, 40, 64))
    num_batch_slots = rng.randint(max_batch_slots // 2, max_batch_slots)
    drafts = 0 if shape.states or rng.random() < 0.7 else rng.choice((1, 3))
    content = rng.choice((0, 0, 0, 6))
    limits = SchedulerLimits(
        max_num_seqs=num_batch_slots,
        max_num_batched_tokens=num_batch_slots * (1 + drafts) + rng.choice((16, 64, 256)),
        max_model_len=max_model_len,
        enable_chunked_prefill=chunked,
        long_prefill_token_threshold=rng.choice((0, 0, 0, 0, 8)) if chunked else 0,
        enable_prefix_caching=rng.random() < 0.8,
        num_lookahead_tokens=drafts,
        max_num_encoder_tokens=content,
        encoder_cache_tokens=content,
    )
    program = Program(
        seed=number,
        limits=limits,
        kv_cache=_make_cache(shape, rng.choice((2, 4, 8)), limits),
        depth=rng.choice((1, 2)),
        holds=rng.random() < 0.25,
        connected=shape.windows == (0,) and not shape.states and rng.random() < 0.1,
    )
    return LongProgram(
        program=program,
        policy=policy,
        options=rng.choice(OPTIONS.get(policy, ({},))),
        shape=shape,
        num_alive=round(num_batch_slots * rng.choice((0.9, 1.2, 2.0))),
        num_steps=num_steps,
    )


def _make_cache(shape: Shape, block_size: int, limits: SchedulerLimits) -> KVCacheConfig:
    specs = shape.specs(block_size)
    groups = tuple(
        KVCacheGroup(layer_names=(f"layers.{g}",), spec=spec) for g, spec in enumerate(specs)
    )
    longest = -(-limits.max_model_len // block_size) + 1
    expected = limits.max_num_seqs * shape.share * 24 / block_size
    num_blocks = 1 + len(groups) * max(round(expected), 3 * longest)
    return KVCacheConfig(num_blocks=num_blocks, groups=groups)


class SoakDriver(SchedulerDriver):
    """The suite's `SchedulerDriver` for caches of any shape. last_stats: never None."""

    last_stats: SchedulerStats

    def __init__(self, long: LongProgram, scheduler_cls: type[SchedulerInterface]) -> None:
        policy = with_options(PluginRegistry().load("policy", long.policy), long.options)
        super().__init__(scheduler_cls, long.program, policy=policy)


def with_options(policy_cls: type[Policy], kwargs: dict[str, Any]) -> type[Policy]:
    """Return the policy class with fixed options. `SchedulerDriver` passes no options."""

    def made(self: Any, options: Any = None) -> None:
        policy_cls.__init__(self, kwargs)  # type: ignore[call-arg]  # this class has options

    return type(policy_cls.__name__, (policy_cls,), {"__init__": made} if kwargs else {})


def play(long: LongProgram, scheduler_cls: type[SchedulerInterface] = Scheduler) -> Tally:
    """Run a program. Raise AssertionError with the program and the first violated rule."""
    with checking(str(long)):
        return _play(long, SoakDriver(long, scheduler_cls))


def _play(long: LongProgram, driver: SoakDriver) -> Tally:
    rng, number = Random(f"play {long.program.seed}"), 0
    for step in range(long.num_steps):
        while len(driver.alive) < long.num_alive and rng.random() < 0.9:
            driver.add(_rich_request(rng, f"r{number}", driver.limits))
            number += 1
        _disturb(rng, driver, number)
        driver.schedule()
        if driver.num_out == long.program.depth:
            driver.settle()
        if not step % CHECK_EVERY:
            driver.scheduler.check_integrity()
    driver.drain()
    driver.scheduler.check_integrity()
    driver.reset()
    return _tally(long, driver, number)


def _disturb(rng: Random, driver: SoakDriver, number: int) -> None:
    """Randomly abort requests, reset the cache, pause, resume or open gates."""
    if rng.random() < 0.1:
        known = [f"r{rng.randrange(max(0, number - 80), number + 1)}" for _ in range(3)]
        driver.abort([*known, "nobody"])
    if rng.random() < 0.01:
        driver.reset()
    if driver.program.holds:
        if rng.random() < 0.02:
            driver.pause(rng.choice(list(PauseScope)))
        elif rng.random() < 0.4:
            driver.resume()
        held = driver.holds.gate.held
        for name in held if rng.random() < 0.5 else ():
            driver.open_gate(name, fails=rng.random() < 0.1)


def _rich_request(rng: Random, name: str, limits: SchedulerLimits) -> Any:
    """Return a request with a tenant, a deadline and often a longer output."""
    request = random_request(rng, name, limits)
    longest = min(30, limits.max_model_len)
    max_tokens = rng.randint(request.max_tokens, longest)
    return replace(
        request,
        max_tokens=max_tokens,
        tenant=rng.choice("abc"),
        deadline_ns=rng.choice((0, rng.randint(1, 600_000_000))),
        sampling_params=replace(
            request.sampling_params,
            max_tokens=max_tokens,
            extra_args={"expected_tokens": rng.randint(1, longest)},
        ),
    )


def _tally(long: LongProgram, driver: SoakDriver, num_requests: int) -> Tally:
    stats, plans = driver.last_stats, driver.plans
    counts = Counter(
        {
            "steps": len(plans),
            "grants": sum(len(plan.rows) for plan in plans),
            "tokens": sum(plan.total_num_tokens for plan in plans),
            "requests": num_requests,
            "preemptions": stats.num_preemptions,
            "prefix hits": sum(1 for count in driver.num_cached.values() if count),
            "aborts": stats.num_aborted,
            "evictions": stats.num_evictions,
            "verified drafts": driver.drafts.num_verified,
            "encoder runs": sum(len(plan.encoder) for plan in plans),
        }
    )
    policies = Counter({long.policy: len(plans)})
    return Tally(counts, policies, Counter({long.shape.name: len(plans)}))
