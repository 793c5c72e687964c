"""The interface for metrics, traces and request logs: observers receive request events.

An observer is called at the start and the end of a request, never for each token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from dovetail.outputs import PoolingRequestOutput, RequestOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """An ended request of a generation or pooling route.

    request_id: the id of the HTTP response. route: its path. status: "ok", "error" or "left" (the
    client closed the connection). code: the code of the error, or "". outputs: the last output of
    each prompt that has one; their `metrics` have the times in nanoseconds. streamed: whether it
    was streamed.
    num_completion_tokens: generated tokens of all completions. num_tokens: the same for each of
    `outputs`. finish_reasons: the reasons of the ended completions. traceparent: the header, or "".
    arrival_ns, end_ns: the clock of the engine when the request arrived and ended.
    """

    request_id: str
    route: str
    status: str
    code: str
    outputs: tuple[RequestOutput | PoolingRequestOutput, ...]
    streamed: bool
    num_completion_tokens: int
    num_tokens: tuple[int, ...] = ()
    finish_reasons: tuple[str, ...] = ()
    traceparent: str = ""
    arrival_ns: int
    end_ns: int


class RequestObserver(Protocol):
    """Receives the events of requests, in the event loop. Must be fast and must not raise."""

    def request_started(self, request_id: str, route: str) -> None:
        """Handle a request whose fields were accepted."""

    def request_ended(self, record: RequestRecord) -> None:
        """Handle the end of an accepted request."""

    def request_rejected(self, route: str, status: int, code: str) -> None:
        """Handle a request that was rejected with an error."""


class Observers:
    """The observers of a server."""

    def __init__(self, observers: Iterable[RequestObserver] = ()) -> None:
        self._observers = list(observers)

    def add(self, observer: RequestObserver) -> None:
        """Add an observer."""
        self._observers.append(observer)

    def started(self, request_id: str, route: str) -> None:
        """Notify all observers of an accepted request."""
        for observer in self._observers:
            observer.request_started(request_id, route)

    def ended(self, record: RequestRecord) -> None:
        """Notify all observers of the end of a request."""
        for observer in self._observers:
            observer.request_ended(record)

    def rejected(self, route: str, status: int, code: str) -> None:
        """Notify all observers of a rejected request."""
        for observer in self._observers:
            observer.request_rejected(route, status, code)
