"""A request can make only the status transitions of the table `TRANSITIONS`."""

import ast
from itertools import product
from pathlib import Path

import pytest

import dovetail.scheduling
from dovetail.request import Request, RequestStatus
from dovetail.scheduling.life_cycle import TRANSITIONS, change_status
from dovetail_devkit.suites.scheduler import make_request

S = RequestStatus
WAITING_ONES = {S.WAITING, S.WAITING_FOR_FSM, S.WAITING_FOR_REMOTE_KVS}
ALIVE = {*WAITING_ONES, S.RUNNING, S.PREEMPTED}


def make(status):
    request = Request(make_request("r"), max_model_len=16)
    request.status = status
    return request


def may_follow(before, after):
    """Return whether a transition is allowed, by rules that are independent of the table."""
    if before.finished:
        return False
    if after in {S.FINISHED_ABORTED, S.FINISHED_ERROR}:
        return True
    if after.finished:  # only a sampled token ends a request normally
        return before in {S.RUNNING, S.PREEMPTED}
    if after is S.RUNNING:  # a request waits again after a gate or a load
        return before in {S.WAITING, S.PREEMPTED}
    if after is S.PREEMPTED:
        return before is S.RUNNING
    if after is S.WAITING:
        return before in {S.WAITING_FOR_FSM, S.WAITING_FOR_REMOTE_KVS}
    if after is S.WAITING_FOR_FSM:  # gates check only new requests
        return before is S.WAITING
    return before in {S.WAITING, S.PREEMPTED}


@pytest.mark.parametrize(("before", "after"), list(product(S, S)), ids=lambda status: status.name)
def test_only_status_changes_in_the_transition_table_are_allowed(before, after):
    request = make(before)
    if may_follow(before, after):
        change_status(request, after)
        assert request.status is after
    else:
        with pytest.raises(
            AssertionError, match=f"'r' cannot change from {before.name} to {after.name}"
        ):
            change_status(request, after)
        assert request.status is before
    assert (after in TRANSITIONS[before]) == may_follow(before, after)


def test_every_status_is_reachable_and_no_live_status_is_final():
    reached = {S.WAITING}
    while grown := {after for before in reached for after in TRANSITIONS[before]} - reached:
        reached |= grown
    assert reached == set(S)
    assert all(TRANSITIONS[status] for status in ALIVE)


def test_only_one_module_assigns_the_status_of_a_request():
    """In the scheduler's package, only one module assigns `.status`."""
    folder = Path(dovetail.scheduling.__file__).parent
    writers = {
        path.name
        for path in folder.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign))
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Attribute) and target.attr == "status"
    }
    assert writers == {"life_cycle.py"}
