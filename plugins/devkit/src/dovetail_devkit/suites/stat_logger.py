"""The conformance suite of the stat logger contract, for any logger.

This module needs no engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import redirect_stdout
from io import StringIO

from dovetail.clock import MonotonicClock
from dovetail.interfaces.scheduler import SchedulerStats
from dovetail.interfaces.stat_logger import StatLogger, StatLoggerContext, StepStats
from dovetail_devkit.expectation import checking, expect

NUM_STEPS = 1000
STEP_NS = 20_000_000
MAX_RECORD_NS = 2_000_000
"""Maximum average time of `record`, in seconds; an engine step does not take much longer."""


def make_step(step_id: int, now_ns: int, **counts: int) -> StepStats:
    """Return the statistics of a step of a busy engine. counts: fields of StepStats to replace."""
    fields = {"num_new_tokens": 8, "num_finished": step_id % 3 == 0, "num_failed": 0} | counts
    return StepStats(
        scheduler=SchedulerStats(
            step_id=step_id,
            num_waiting=step_id % 5,
            num_running=8,
            num_scheduled_tokens=16,
            kv_cache_usage=0.25,
            prefix_queries=32 * step_id,
            prefix_hits=8 * step_id,
            num_preemptions=step_id // 100,
            num_recomputed_tokens=step_id // 10,
        ),
        now_ns=now_ns,
        **fields,
    )


@checking("stat_logger")
def check_stat_logger(
    logger_cls: type[StatLogger], *, options: Mapping[str, object] | None = None
) -> None:
    """Check a logger against its contract. Raise AssertionError with the violated rule.

    options: constructor options; None for none.
    """
    clock, printed = MonotonicClock(), StringIO()
    with redirect_stdout(printed):
        start_ns = 7_000_000_000
        context = StatLoggerContext(
            served_model_name="tiny", start_ns=start_ns, options=options or {}
        )
        silent = logger_cls(context)
        silent.close()
        stat_logger = logger_cls(context)
        began_ns = clock.now_ns()
        for step_id in range(NUM_STEPS):
            now_ns = start_ns + STEP_NS * step_id
            result: object = stat_logger.record(make_step(step_id, now_ns))
            expect(result is None, f"record() returns {result!r}; expected None")
        took_ns = (clock.now_ns() - began_ns) // NUM_STEPS
        stat_logger.record(make_step(NUM_STEPS, now_ns))  # includes the time of the last step
        stat_logger.close()
        stat_logger.close()
    expect(
        took_ns < MAX_RECORD_NS, f"record() takes {took_ns / 1e6:.1f} ms, which delays the engine"
    )
    text = printed.getvalue()[:100]
    expect(not text, f"the logger must not print to stdout; it prints {text!r}")
