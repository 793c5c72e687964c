"""What a simulated engine is: its limits, its cache, its policy and its step times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dovetail.interfaces import SchedulerLimits
from dovetail.plan import SchedulerOutput


@dataclass(frozen=True, kw_only=True)
class EngineSetup:
    """The engine of a run, simulated or real.

    scheduler: name of a scheduler or policy, "pkg.mod:Class" or "./file.py:Class", as for
    `scheduler_cls`. options: options of the scheduler or policy. num_blocks, block_size: the KV
    cache: number of blocks, and tokens per block. depth: steps in flight, 1 to 4. seed: for the
    policy's random numbers. trust_local_code: whether `scheduler` may name a file.
    """

    scheduler: str
    limits: SchedulerLimits
    num_blocks: int
    block_size: int = 16
    depth: int = 1
    seed: int = 0
    options: Mapping[str, object] = field(default_factory=dict)
    policy_options: Mapping[str, object] = field(default_factory=dict)
    trust_local_code: bool = False


@dataclass(frozen=True, slots=True)
class DecodeStretch:
    """Consecutive steps in which the same `num_requests` requests decode one token each.

    num_kv_tokens: tokens in the cache that the first of the steps reads; each further step reads
    `num_requests` more.
    """

    num_requests: int
    num_kv_tokens: int
    num_steps: int


class StepTimeModel(Protocol):
    """Computes the duration of steps, in integer nanoseconds.

    name: for reports. affine_decode: whether the duration of a decode step is an affine function of
    its KV tokens, so that `stretch_ns` is exact in constant time.
    """

    name: str
    affine_decode: bool

    def step_ns(self, plan: SchedulerOutput, num_kv_tokens: Sequence[int]) -> int:
        """Return the time of one step. num_kv_tokens: per run, cached tokens before the step."""

    def stretch_ns(self, stretch: DecodeStretch) -> int:
        """Return exactly the sum of `step_ns` over the steps of a stretch."""
