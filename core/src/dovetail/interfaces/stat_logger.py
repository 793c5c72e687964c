"""The contract of a stat logger: it hears what each step did, and tells somebody.

It runs in the engine's process and thread, after each step; so it does little and never waits. It
sees counts only: no prompt, no token, no request.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from dovetail.interfaces.scheduler import SchedulerStats


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """What one step did.

    scheduler: the scheduler's counts after it. now_ns: the engine's clock, once its result was in.
    num_new_tokens: tokens given to requests. num_finished, num_failed: requests that ended with
    it, and those of them that ended with an error.
    """

    scheduler: SchedulerStats
    now_ns: int
    num_new_tokens: int
    num_finished: int
    num_failed: int


@dataclass(frozen=True, kw_only=True)
class StatLoggerContext:
    """All that a stat logger is made from.

    served_model_name: what clients call the model. start_ns: the engine's clock when the logger is
    made. options: the user's, from `plugin_options`.
    """

    served_model_name: str
    start_ns: int
    options: Mapping[str, object] = field(default_factory=dict)


class StatLogger(ABC):
    """Hears of every step.

    Contract. `record` is called once for each step whose scheduler gave statistics, in order;
    `close` ends it. Where requests came or were aborted and nothing can run, a step that runs
    nothing follows, so that the last counts are those of now. A `record` that raises is the last:
    the logger is closed and one warning tells why; the engine continues. What it writes, it writes
    to where its options say, not to stdout.
    """

    CONTRACT: ClassVar[str] = "stat_logger"
    CONTRACT_VERSION: ClassVar[str] = "0.2"

    @abstractmethod
    def __init__(self, context: StatLoggerContext) -> None:
        """Open what it writes to; raise ConfigError for options that are wrong."""

    @abstractmethod
    def record(self, step: StepStats) -> None:
        """Take in what a step did; cheap, and without waiting."""

    @abstractmethod
    def close(self) -> None:
        """Write what is due and let go of everything. May be called twice."""
