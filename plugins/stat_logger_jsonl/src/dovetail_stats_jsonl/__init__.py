"""Writes the statistics of an engine as JSON lines every few seconds: `stat_loggers=["jsonl"]`.

A line covers the time since the previous line: throughput, numbers of running and waiting requests,
usage of the KV cache, hit rate of the prefix cache. It contains only counts, no prompts, outputs or
request ids.
"""

from __future__ import annotations

import json
import sys
from typing import ClassVar, TextIO

from pydantic import BaseModel, ConfigDict, Field

from dovetail.errors import ConfigError
from dovetail.interfaces import SchedulerStats, StatLogger, StatLoggerContext, StepStats

__all__ = ["JSONLOptions", "JSONLStatLogger"]


class JSONLOptions(BaseModel):
    """The options, given as `plugin_options={"jsonl": {…}}`.

    path: the file to append to; empty for stderr. interval_s: minimum time between two lines in
    seconds; 0 for one line per step.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str = ""
    interval_s: float = Field(default=10.0, ge=0, allow_inf_nan=False)


class _Window:
    """The counts since the last line."""

    __slots__ = ("before", "num_failed", "num_finished", "num_new", "num_scheduled", "num_steps")

    def __init__(self, before: SchedulerStats | None) -> None:
        """before: the scheduler's totals at the last line. None before the first line."""
        self.before = before
        self.num_steps = self.num_new = self.num_scheduled = 0
        self.num_finished = self.num_failed = 0

    def add(self, step: StepStats) -> None:
        self.num_steps += 1
        self.num_new += step.num_new_tokens
        self.num_scheduled += step.scheduler.num_scheduled_tokens
        self.num_finished += step.num_finished
        self.num_failed += step.num_failed

    def increase(self, name: str, now: SchedulerStats) -> int:
        """Return the increase of one of the scheduler's totals since the last line."""
        increase: int = getattr(now, name) - (getattr(self.before, name) if self.before else 0)
        return increase


class JSONLStatLogger(StatLogger):
    """Writes JSON lines to a file or to stderr.

    Fields: time_s (since the engine's start), num_steps, new_tokens_per_s (output tokens of
    requests), scheduled_tokens_per_s (prompt and output tokens), num_running, num_waiting,
    kv_cache_usage (0 to 1), prefix_hit_rate (0 to 1; null if nothing was looked up),
    num_preemptions, num_recomputed_tokens, num_finished, num_failed. A line is written at the first
    step after the interval, and at the end. Rates are null if no time has passed.
    """

    CONTRACT_VERSION: ClassVar[str] = "0.2"
    options_model: ClassVar[type[BaseModel]] = JSONLOptions

    def __init__(self, context: StatLoggerContext) -> None:
        options = JSONLOptions(**context.options)  # type: ignore[arg-type]  # already validated
        self._interval_ns = int(options.interval_s * 1e9)
        self._start_ns = self._line_ns = context.start_ns
        self._window = _Window(None)
        self._last: StepStats | None = None
        self._file: TextIO | None = _open(options.path) if options.path else None
        self._closed = False

    def record(self, step: StepStats) -> None:
        """Add a step. Write a line if the interval has passed."""
        self._window.add(step)
        self._last = step
        if step.now_ns - self._line_ns >= self._interval_ns:
            self._write(step)

    def close(self) -> None:
        """Write a last line if there were steps since the previous line, and close the file."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._last is not None and self._window.num_steps:
                self._write(self._last)
        finally:
            if self._file is not None:
                self._file.close()

    def _write(self, step: StepStats) -> None:
        window, stats = self._window, step.scheduler
        seconds = (step.now_ns - self._line_ns) / 1e9
        queries = window.increase("prefix_queries", stats)
        hits = window.increase("prefix_hits", stats)
        line = {
            "time_s": round((step.now_ns - self._start_ns) / 1e9, 3),
            "num_steps": window.num_steps,
            "new_tokens_per_s": _ratio(window.num_new, seconds, 1),
            "scheduled_tokens_per_s": _ratio(window.num_scheduled, seconds, 1),
            "num_running": stats.num_running,
            "num_waiting": stats.num_waiting,
            "kv_cache_usage": round(stats.kv_cache_usage, 4),
            "prefix_hit_rate": _ratio(hits, queries, 4),
            "num_preemptions": window.increase("num_preemptions", stats),
            "num_recomputed_tokens": window.increase("num_recomputed_tokens", stats),
            "num_finished": window.num_finished,
            "num_failed": window.num_failed,
        }
        # sys.stderr is read for each line, so that a redirection takes effect.
        out = self._file if self._file is not None else sys.stderr
        out.write(f"{json.dumps(line)}\n")
        out.flush()
        self._window, self._line_ns = _Window(stats), step.now_ns


def _ratio(number: float, of: float, digits: int) -> float | None:
    return round(number / of, digits) if of > 0 else None


def _open(path: str) -> TextIO:
    try:
        return open(path, "a", encoding="utf-8")  # closed by `close`
    except OSError as error:
        raise ConfigError(
            f"plugin_options: jsonl: path={path!r} cannot be written: {error.strerror}. Pass a "
            f"file in an existing directory, or remove the option to write to stderr."
        ) from error
