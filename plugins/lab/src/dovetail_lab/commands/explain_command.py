"""`dovetail lab explain`: explain why a request was or was not scheduled in a step of a log."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from dovetail.cli.plugins_table import print_line, print_table
from dovetail.errors import UserError, nearest
from dovetail_lab.inspection.explanation import describe_actions, explain_request
from dovetail_lab.inspection.observed_replay import ObservedStep, observe_step
from dovetail_lab.inspection.step_view import RequestState
from dovetail_lab.replay import checked_reference

_LOG_HELP = "The decision log: a file written with --decision-log."
_STEP_HELP = "The index of the step, from 0."
_REQUEST_HELP = "The id of a request; without it, the step is described."
_SCHEDULER_HELP = "Replay with this scheduler or policy instead of the recorded one."
_TRUST_HELP = "Run schedulers and policies that the log or --scheduler names as ./file.py:Class."
_MAX_ROWS = 20


def explain(
    log: Annotated[Path, Parameter(help=_LOG_HELP)],
    step: Annotated[int, Parameter(help=_STEP_HELP)],
    request: Annotated[str, Parameter(help=_REQUEST_HELP)] = "",
    /,
    *,
    scheduler: Annotated[str | None, Parameter(help=_SCHEDULER_HELP, show_default=False)] = None,
    trust_local_code: Annotated[bool, Parameter(negative="", help=_TRUST_HELP)] = False,
) -> int:
    """Explain a step: the policy's order and actions, and the free tokens, slots and blocks."""
    if step < 0:
        raise UserError(f"step {step} must not be negative.")
    result = observe_step(
        log, step, scheduler=checked_reference(scheduler), trust_local_code=trust_local_code
    )
    if request:
        _check_known(result, request)
        for sentence in explain_request(result, request):
            print_line(sentence)
    print_step(result)
    return 0


def print_step(step: ObservedStep) -> None:
    """Print the policy's view of a step and its actions."""
    view, limits = step.view, step.header.limits
    print_line(
        f"Step {view.step_id} of {step.scheduler}: {len(view.running)} running, "
        f"{len(view.waiting)} waiting; {view.tokens_left} of {limits.max_num_batched_tokens} "
        f"tokens, {view.seats_left} of {limits.max_num_seqs} batch slots and {view.free_blocks} "
        f"blocks of {view.block_size} tokens free.",
        style="bold",
    )
    headings = ("", "request", "rank", "prompt", "output", "computed", "to compute", "granted")
    rows = [
        *_rows("running", view.running, step),
        *_rows("waiting", view.waiting, step),
    ]
    print_table(headings, rows)
    for line in describe_actions(view)[:_MAX_ROWS]:
        print_line(f"  {line}")
    hidden = len(view.attempts) - _MAX_ROWS
    if hidden > 0:
        print_line(f"  … {hidden} more actions")
    if view.victims:
        print_line(f"  preempted for lack of blocks: {', '.join(view.victims)}")


def _rows(kind: str, states: Sequence[RequestState], step: ObservedStep) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = [_row(kind, state, step) for state in states[:_MAX_ROWS]]
    if len(states) > _MAX_ROWS:
        rows.append((kind, f"… {len(states) - _MAX_ROWS} more", "", "", "", "", "", ""))
    return rows


def _row(kind: str, state: RequestState, step: ObservedStep) -> Sequence[str]:
    return (
        kind,
        state.request_id,
        state.rank[:40],
        str(state.num_prompt),
        str(state.num_output),
        str(state.num_computed or state.num_cached),
        str(state.num_uncomputed),
        str(step.granted.get(state.request_id, "")),
    )


def _check_known(step: ObservedStep, request: str) -> None:
    seen = {item.request_id for item in (*step.view.running, *step.view.waiting)}
    if request not in step.known | seen:
        hint = nearest(request, step.known)
        raise UserError(
            f"request {request!r} did not arrive before step {step.view.step_id}.{hint}"
        )
