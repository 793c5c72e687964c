"""`dovetail lab replay`: replay and verify a decision log.

The exit code is 1 if a plan differs.
"""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from dovetail.cli.plugins_table import print_line
from dovetail.cli.terminal import count_text
from dovetail.clock import MonotonicClock
from dovetail.decision_log import LogReader
from dovetail_lab.replay import Difference, Replay, checked_reference, replay_log

_LOG_HELP = "The decision log: a file written with --decision-log."
_SCHEDULER_HELP = "Replay with this scheduler or policy and show the first plan that differs."
_TRUST_HELP = "Run schedulers and policies that the log or --scheduler names as ./file.py:Class."
_MAX_SHOWN = 200


def replay(
    log: Annotated[Path, Parameter(help=_LOG_HELP)],
    /,
    *,
    scheduler: Annotated[str | None, Parameter(help=_SCHEDULER_HELP, show_default=False)] = None,
    trust_local_code: Annotated[bool, Parameter(negative="", help=_TRUST_HELP)] = False,
) -> int:
    """Replay a decision log, and verify that every plan is the same, byte for byte.

    No model is needed, because the results of the worker and the times come from the log.
    """
    result = replay_log(
        LogReader(log),
        clock=MonotonicClock(),
        scheduler=checked_reference(scheduler),
        trust_local_code=trust_local_code,
    )
    print_line(_summary(result))
    if result.truncated:
        print_line("The log is truncated; its complete records were replayed.")
    if result.difference is None:
        print_line("Every plan is the same, byte for byte.", style="bold green")
        return 0
    _show(result.difference)
    return 1


def _summary(replay: Replay) -> str:
    took_s = replay.took_ns / 1e9
    return (
        f"{replay.scheduler}: {count_text(replay.num_steps, 'step')} of "
        f"{count_text(replay.num_requests, 'request')}, "
        f"{replay.covered_ns / 1e9:.3f} s of engine time, replayed in {took_s:.3f} s "
        f"({replay.num_steps / took_s if took_s else 0:,.0f} steps/s)."
    )


def _show(difference: Difference) -> None:
    print_line(f"Step {difference.step} is the first step that differs:", style="bold red")
    for name, sides in difference.fields.items():
        for side, value in zip(("log", "replay"), sides, strict=True):
            print_line(f"  {name:<13} {side:<6} {_shown(value)}")


def _shown(value: object) -> str:
    text = str(value.tolist() if isinstance(value, array) else value)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 1]}…"
