"""The unfinished calls and requests of an engine, which are lost when it fails."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

from dovetail.clock import Clock, MonotonicClock
from dovetail.engine.channel import Call, Received, Reply
from dovetail.engine.input.input_processor import user_request_id
from dovetail.engine.port import EnginePort
from dovetail.engine.supervision.crash_tracker import CrashTracker
from dovetail.engine.supervision.rules import SupervisionRules
from dovetail.errors import DovetailError, RequestError, UnavailableError
from dovetail.interfaces import EngineCoreOutputs, Finished
from dovetail.request import EngineCoreRequest, FinishReason

_NORMAL_ENDS = (FinishReason.STOP, FinishReason.LENGTH)


class Work:
    """The unfinished work of successive engines. Thread-safe.

    lost: messages for callers that wait for failed engines: replies, and ends of requests.
    """

    def __init__(self, rules: SupervisionRules, clock: Clock | None = None) -> None:
        self.lost: deque[Received] = deque()
        self._crashes = CrashTracker(rules, clock or MonotonicClock())
        self._requests: dict[str, EngineCoreRequest] = {}
        self._calls: dict[int, Call] = {}
        self._rejected: dict[int, dict[str, RequestError]] = {}
        self._lock = threading.Lock()

    def begin(self, call: Call) -> Call:
        """Record a call and its requests. Return it with those requests that may run.

        Raises RequestError for a request that has crashed engines, UnavailableError for one that
        has to wait for another suspect.
        """
        with self._lock:
            if call.operation.name == EnginePort.add_request.name:
                self._admit(call.arguments[0])
            elif call.operation.takes_requests:
                call = self._admit_several(call)
            elif call.operation.name == EnginePort.abort_requests.name:
                self._dismiss_all(call.arguments[0])  # not lost if the engine fails now
            if call.number:
                self._calls[call.number] = call
            return call

    def discard(self, call: Call) -> bool:
        """Remove an engine call that was not sent. Return False if it was already lost."""
        with self._lock:
            known = not call.number or self._calls.pop(call.number, None) is not None
            for request in _requests_of(call):
                known = self._dismiss(request.request_id) and known
            return known

    def note(self, message: Received) -> Received:
        """Record the calls and requests that `message` completes. Return the caller's message."""
        with self._lock:
            if isinstance(message, EngineCoreOutputs):
                for ending in message.finished:
                    self._dismiss(ending.request_id, is_normal=ending.reason in _NORMAL_ENDS)
                return message
            call = self._calls.pop(message.number, None)
            rejected = self._rejected.pop(message.number, {})
            if call is None or message.error is not None:
                return message
            if call.operation.takes_requests:
                message = replace(message, value=rejected | message.value)
                self._dismiss_all(message.value)
            return message

    def blames_request(self, *, was_killed: bool) -> bool:
        """Return whether an unfinished request is to blame for the engine's failure."""
        with self._lock:
            return self._crashes.blames_request(self._in_progress(), was_killed=was_killed)

    def lose(self, reason: str, *, was_killed: bool, restarts_left: int) -> int:
        """Move all unfinished work into `lost`. Return the number of requests.

        was_killed: whether a SIGKILL from outside the supervisor killed it.
        """
        with self._lock:
            self._crashes.restarts_left = restarts_left
            self._crashes.record_crash(self._in_progress(), was_killed=was_killed)
            for call in self._calls.values():
                self.lost.append(_lost_reply(call, reason))
            message = f"EngineDeadError: {reason}"
            ends = tuple(
                Finished(request_id=name, reason=FinishReason.ERROR, message=message)
                for name in self._requests
                if name not in self._unanswered()
            )
            if ends:
                self.lost.append(EngineCoreOutputs(finished=ends))
            num_lost = len(self._requests)
            self._requests.clear()
            self._calls.clear()
            self._rejected.clear()
            return num_lost

    def _in_progress(self) -> list[tuple[str, EngineCoreRequest]]:
        return [(user_request_id(name), request) for name, request in self._requests.items()]

    def _unanswered(self) -> set[str]:
        """Return the ids of requests in calls without a reply: the error reply ends them."""
        calls = self._calls.values()
        return {request.request_id for call in calls for request in _requests_of(call)}

    def _admit(self, request: EngineCoreRequest) -> None:
        self._crashes.admit(user_request_id(request.request_id), request)
        self._requests[request.request_id] = request

    def _admit_several(self, call: Call) -> Call:
        rejected: dict[str, RequestError] = {}
        admitted = []
        for request in call.arguments[0]:
            try:
                self._admit(request)
                admitted.append(request)
            except RequestError as error:
                rejected[request.request_id] = error
            except UnavailableError as error:
                rejected[request.request_id] = RequestError(str(error), parameter="prompt")
        self._rejected[call.number] = rejected
        return replace(call, arguments=(admitted,))

    def _dismiss(self, request_id: str, *, is_normal: bool = False) -> bool:
        request = self._requests.pop(request_id, None)
        if request is not None:
            user_id = user_request_id(request_id)
            self._crashes.record_end(user_id, request, is_normal=is_normal)
        return request is not None

    def _dismiss_all(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._dismiss(request_id)


def _requests_of(call: Call) -> Sequence[EngineCoreRequest]:
    """Return the requests that a call contains."""
    if not call.operation.takes_requests:
        return ()
    argument = call.arguments[0]
    return (argument,) if isinstance(argument, EngineCoreRequest) else argument


def _lost_reply(call: Call, reason: str) -> Reply:
    """Return the reply to a call during which the engine failed. A call to abort succeeds."""
    if call.operation.name == EnginePort.abort_requests.name:
        return Reply(call.number)
    error: DovetailError = UnavailableError(
        f"The engine failed during the call and is being restarted: {reason}"
    )
    return Reply(call.number, None, error)
