"""The life cycle of a request: which status may follow which, and the one way to change it.

                     a gate lets it pass                  its blocks are on their way
    WAITING_FOR_FSM ────────────────────► WAITING ───────────────────► WAITING_FOR_REMOTE_KVS
          ▲                               │  │  ▲                            │   ▲
          └─────── a gate holds it ───────┘  │  └─── loaded, or not ─────────┘   │
                                             ▼                                   │
                                          RUNNING ─ loses row and blocks ─► PREEMPTED
                                             ▲                                   │
                                             └─────────── comes back ────────────┘

A new request is WAITING; one that a gate holds becomes WAITING_FOR_FSM at once. A preempted
request never passes a gate again. From every status above an abort or an error may end a request;
a stop token or the full length ends one that runs, or one that was preempted while its last token
was on the way. What is FINISHED stays so.

Knows statuses only: rows, blocks and queues are moved by who calls.
"""

from __future__ import annotations

from collections.abc import Mapping

from dovetail.request import Request, RequestStatus

_S = RequestStatus
_BROKEN_OFF = {_S.FINISHED_ABORTED, _S.FINISHED_ERROR}
_FINISHED = {status for status in _S if status.finished}

TRANSITIONS: Mapping[RequestStatus, frozenset[RequestStatus]] = {
    _S.WAITING: frozenset(
        {_S.WAITING_FOR_FSM, _S.WAITING_FOR_REMOTE_KVS, _S.RUNNING, *_BROKEN_OFF}
    ),
    _S.WAITING_FOR_FSM: frozenset({_S.WAITING, *_BROKEN_OFF}),
    _S.WAITING_FOR_REMOTE_KVS: frozenset({_S.WAITING, *_BROKEN_OFF}),
    _S.RUNNING: frozenset({_S.PREEMPTED, *_FINISHED}),
    _S.PREEMPTED: frozenset({_S.WAITING_FOR_REMOTE_KVS, _S.RUNNING, *_FINISHED}),
    **{status: frozenset() for status in _FINISHED},
}
"""Every status to those that may follow it."""

_MASKS = tuple(sum(1 << after for after in TRANSITIONS[status]) for status in _S)


def change_status(request: Request, status: RequestStatus) -> None:
    """Let `request` be in `status` from now on.

    Raises AssertionError, naming the request and the transition, for one that `TRANSITIONS` does
    not know: then the scheduler is wrong, and nothing that it holds can be trusted.
    """
    if not _MASKS[request.status] >> status & 1:
        raise AssertionError(
            f"request {request.request_id!r} goes from {request.status.name} to {status.name}, "
            "which its life cycle does not know"
        )
    request.status = status
