"""`dovetail lab diff`: find the first step in which two policies decide differently.

The exit code is 1 if the policies differ.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from dovetail.cli.plugins_table import print_line
from dovetail.clock import MonotonicClock
from dovetail.decision_log import LogReader
from dovetail_lab.commands.explain_command import print_step
from dovetail_lab.inspection.observed_replay import ObservedStep, observe_step
from dovetail_lab.replay import checked_reference, replay_log

_LOG_HELP = "The decision log of the first policy."
_SCHEDULER_HELP = "The second scheduler or policy."
_TRUST_HELP = "Run schedulers and policies that are given as ./file.py:Class."


def diff(
    log: Annotated[Path, Parameter(help=_LOG_HELP)],
    scheduler: Annotated[str, Parameter(help=_SCHEDULER_HELP)],
    /,
    *,
    trust_local_code: Annotated[bool, Parameter(negative="", help=_TRUST_HELP)] = False,
) -> int:
    """Find the first step in which another policy decides differently, and show both views."""
    result = replay_log(
        LogReader(log),
        clock=MonotonicClock(),
        scheduler=checked_reference(scheduler),
        trust_local_code=trust_local_code,
    )
    if result.difference is None:
        print_line(
            f"{scheduler} makes the same {result.num_steps:,} plans as the log, byte for byte."
        )
        return 0
    step = result.difference.step
    sides = [
        observe_step(log, step, scheduler=name, trust_local_code=trust_local_code)
        for name in ("", scheduler)
    ]
    print_line(f"The first {step:,} steps are equal. Step {step} differs:", style="bold red")
    for line in plan_differences(*sides):
        print_line(f"  {line}")
    for side in sides:
        print_line("")
        print_step(side)
    return 1


def plan_differences(left: ObservedStep, right: ObservedStep) -> list[str]:
    """Return one line per request to which the two plans give different numbers of tokens."""
    names = list(dict.fromkeys([*left.granted, *right.granted]))
    classes = [side.scheduler.rpartition(":")[2] for side in (left, right)]
    if classes[0] == classes[1]:
        classes = [left.scheduler, right.scheduler]
    lines = [
        f"{name}: {left.granted.get(name, 0)} tokens with {classes[0]}, "
        f"{right.granted.get(name, 0)} with {classes[1]}"
        for name in names
        if left.granted.get(name, 0) != right.granted.get(name, 0)
    ]
    return lines or ["The same requests get the same tokens, in another order or other blocks."]
