"""The contract of a stat logger: it receives the statistics of each step and exports them.

It runs in the engine's process and thread after each step, so it must be fast and never wait. It
receives counts only, no prompts, tokens or requests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from dovetail.interfaces.scheduler import SchedulerStats


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """The statistics of one step.

    scheduler: counts of the scheduler after the step. now_ns: the engine's clock after its result.
    num_new_tokens: number of new tokens of all requests. num_finished: number of requests that
    ended in the step. num_failed: how many of them ended with an error.
    """

    scheduler: SchedulerStats
    now_ns: int
    num_new_tokens: int
    num_finished: int
    num_failed: int


@dataclass(frozen=True, kw_only=True)
class StatLoggerContext:
    """Constructor arguments of a stat logger.

    served_model_name: the model's name for clients. start_ns: the engine's clock when the logger is
    created. options: the user's options from `plugin_options`.
    """

    served_model_name: str
    start_ns: int
    options: Mapping[str, object] = field(default_factory=dict)


class StatLogger(ABC):
    """Receives the statistics of every step.

    Contract: `record` is called in order, once for each step for which the scheduler returned
    statistics. If requests were added or aborted and no request can run, an empty step follows, so
    that the counts are current. If `record` raises, the logger is closed, one warning gives the
    reason, and the engine continues. A logger writes to the destination in its options, not to
    stdout.
    """

    CONTRACT: ClassVar[str] = "stat_logger"
    CONTRACT_VERSION: ClassVar[str] = "0.2"

    @abstractmethod
    def __init__(self, context: StatLoggerContext) -> None:
        """Open the destination. Raise ConfigError for invalid options."""

    @abstractmethod
    def record(self, step: StepStats) -> None:
        """Record one step. Must be fast and must not wait."""

    @abstractmethod
    def close(self) -> None:
        """Flush and release all resources. May be called more than once."""
