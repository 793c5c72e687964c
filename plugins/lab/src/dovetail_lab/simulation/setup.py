"""The setup of a simulated engine: its limits, its cache, its policy and its step times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np

from dovetail.interfaces import SchedulerLimits
from dovetail.plan import SchedulerOutput
from dovetail_lab.simulation.previous_step import After

Times: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"
"""Times in nanoseconds, one per step."""


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


class StepTimeModel(Protocol):
    """Computes the duration of steps, in integer nanoseconds."""

    @property
    def name(self) -> str:
        """The name of the model, for reports."""

    def step_ns(self, plan: SchedulerOutput) -> int:
        """Return the time of one step, at least 1."""

    def decode_times_ns(self, num_requests: int, num_kv_tokens: int, num_steps: int) -> Times:
        """Return the times of consecutive steps in which the same requests decode one token each.

        num_kv_tokens: cached tokens that the first of the steps reads, over all requests; each
        further step reads `num_requests` more. Each time equals that of `step_ns` for this step.
        """

    def batch_change_ns(self, after: After) -> int:
        """Return the additional time of a decode-only step, given the step before; 0 for SAME."""

    def gap_ns(self, num_runs: int, num_prefill_tokens: int = 0) -> int:
        """Return the host's time from the end of a step to the plan of the next one.

        num_runs, num_prefill_tokens: the number of scheduled requests and of prefill tokens in the
        step that has ended, see `StepFeatures`. With more than one step in flight,
        the host works during the next step, so the gap is not used.
        """
