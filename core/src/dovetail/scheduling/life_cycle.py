"""The life cycle of a request: the allowed transitions between statuses.

                      all gates admit it                    blocks are being loaded
    WAITING_FOR_FSM ────────────────────► WAITING ───────────────────► WAITING_FOR_REMOTE_KVS
          ▲                               │  │  ▲                            │   ▲
          └────── a gate holds it ────────┘  │  └── loaded, or failed ───────┘   │
                                             ▼                                   │
                                          RUNNING ── loses row, blocks ─► PREEMPTED
                                             ▲                                   │
                                             └──────────── resumes ──────────────┘

A new request is WAITING; one that a gate holds becomes WAITING_FOR_FSM immediately. A preempted
request never passes a gate again. An abort or an error may end a request in every status above;
a stop token or the length limit ends a running request, or a preempted one whose last token was
in flight. A FINISHED request does not change.

This module only sets the status: the caller moves batch slots, blocks and queue entries.
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
"""Maps every status to the statuses that may follow it."""

_MASKS = tuple(sum(1 << after for after in TRANSITIONS[status]) for status in _S)


def change_status(request: Request, status: RequestStatus) -> None:
    """Set the status of `request`.

    Raises AssertionError, naming the request and the transition, if `TRANSITIONS` does not allow
    it: the scheduler's state is then inconsistent.
    """
    if not _MASKS[request.status] >> status & 1:
        raise AssertionError(
            f"request {request.request_id!r} cannot change from {request.status.name} to "
            f"{status.name}"
        )
    request.status = status
