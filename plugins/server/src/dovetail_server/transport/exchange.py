"""One request and its response, based on the ASGI callables.

A response is either one body or a stream of server-sent events. A stream starts with its first
event, so that an error before that event still gets its own HTTP status.
"""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    MutableMapping,
)
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from dovetail_server.protocol.errors import OPENAI_ERRORS, APIError, ErrorForm
from dovetail_server.settings import KIB, ServerSettings
from dovetail_server.transport.body import BodyReader, ClientLeftError, read_json_object

Header = tuple[bytes, bytes]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

LARGE_BYTES = 64 * KIB
JSON_TYPE = b"application/json"
_EVENT_HEADERS: tuple[Header, ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
)
_BODY = "http.response.body"


class Exchange:
    """A request and its response.

    method, path, query, headers: properties of the request; header names are in lower case. rest:
    the end of the path behind a route that ends with "/*". request_id: the id of the response.
    caller: the name of the API key, or "". response_id: the `id` field of a generated response, or
    "". started, ended: whether the response has started and whether it is complete. failure: the
    error passed to `interrupt`, or None. left: whether the client has closed
    the connection. is_background: whether no client waits, so that the request has the lowest
    priority.
    extra_headers: further headers of the response. errors: the format of errors.
    """

    __slots__ = (
        "_bodies",
        "_cycle",
        "_receive",
        "_send",
        "_sends_events",
        "_settings",
        "_task",
        "_watcher",
        "caller",
        "ended",
        "errors",
        "extra_headers",
        "failure",
        "headers",
        "is_background",
        "left",
        "method",
        "path",
        "query",
        "request_id",
        "response_id",
        "rest",
        "started",
    )

    def __init__(
        self,
        scope: Mapping[str, Any],
        receive: Callable[[], Awaitable[Mapping[str, Any]]],
        send: Send,
        bodies: BodyReader,
        settings: ServerSettings,
    ) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: bytes = scope["query_string"]
        self.headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        self.rest = ""
        self.request_id = ""
        self.caller = ""
        self.response_id = ""
        self.started = self.ended = self.left = self._sends_events = False
        self.is_background = False
        self.errors: ErrorForm = OPENAI_ERRORS
        self.failure: APIError | None = None
        self.extra_headers: list[Header] = []
        self._receive = receive
        self._send = send
        cycle = getattr(send, "__self__", None)
        self._cycle = cycle if isinstance(cycle, RequestResponseCycle) else None
        self._bodies = bodies
        self._settings = settings
        self._task = asyncio.current_task()
        self._watcher: asyncio.Task[None] | None = None

    async def read_body(self) -> bytes:
        """Return the body. Cancel this task when the client closes the connection."""
        body = await self._bodies.read(self.headers, self._receive)
        self._watcher = asyncio.create_task(self._watch())
        return body

    async def read_pieces(self) -> AsyncIterator[bytes]:
        """Yield the parts of the body as they arrive. The caller limits its size.

        Raises ClientLeftError if the body is incomplete.
        """
        has_more = True
        while has_more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientLeftError
            has_more = message.get("more_body", False)
            yield message.get("body", b"")
        self._watcher = asyncio.create_task(self._watch())

    def allow_body_time(self, seconds: float) -> None:
        """Give the client more time to send the body."""
        allow = getattr(self._cycle and self._cycle.transport, "allow_body_time", None)
        if allow is not None:
            allow(seconds)

    async def read_object(self, *, may_be_empty: bool = False) -> dict[str, Any]:
        """Return the JSON object in the body. Raise APIError if it is something else."""
        body = await self.read_body()
        if may_be_empty and not body:
            return {}
        fields = read_json_object(self.headers, body, self._settings)
        if len(body) > LARGE_BYTES:
            await asyncio.sleep(0)  # other requests continue before this one is checked
        return fields

    async def respond(
        self, content: object, *, status: int = 200, headers: Iterable[Header] = ()
    ) -> None:
        """Send the whole response. content: JSON as bytes, or a value to send as JSON."""
        body = content if isinstance(content, bytes) else msgspec.json.encode(content)
        await self.respond_raw(status, ((b"content-type", JSON_TYPE), *headers), body)

    async def respond_raw(self, status: int, headers: Iterable[Header], body: bytes) -> None:
        """Send the whole response with these headers."""
        self.started = self.ended = True
        await self._start(status, ((b"content-length", str(len(body)).encode()), *headers))
        await self._send({"type": _BODY, "body": body, "more_body": False})

    async def write(self, events: bytes) -> None:
        """Send a part of a stream of events. Waits while the client does not read."""
        if not self.started:
            await self._start_events()
        await self._send({"type": _BODY, "body": events, "more_body": True})

    @property
    def can_write_now(self) -> bool:
        """Whether `write_now` may be called: the stream has started, and the client reads it."""
        cycle = self._cycle
        return (
            cycle is not None
            and self.started
            and not self.ended
            and cycle.chunked_encoding is True
            and not cycle.flow.write_paused
            and not cycle.disconnected
        )

    def write_now(self, events: bytes) -> None:
        """Send a part of a stream of events, as `write` does, but without waiting."""
        assert self._cycle is not None
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(events), events))

    async def start_stream(self, headers: Iterable[Header], status: int = 200) -> None:
        """Send the headers of a streamed response that is not a stream of events."""
        self.started = True
        await self._start(status, headers)

    async def _start_events(self) -> None:
        self._sends_events = True
        await self.start_stream(_EVENT_HEADERS)

    async def end(self, events: bytes = b"") -> None:
        """Send the last part of a stream."""
        if not self.started:
            await self._start_events()
        self.ended = True
        await self._send({"type": _BODY, "body": events, "more_body": False})

    async def fail(self, error: APIError) -> None:
        """Send an error, as a response or as the last event of a started stream."""
        if self.ended or self.left:
            return
        if self.started:
            sends = self._sends_events
            await self.end(self.errors.event(error, self.request_id) if sends else b"")
        else:
            body = self.errors.body(error, self.request_id)
            await self.respond(body, status=error.status, headers=error.headers())

    def interrupt(self, error: APIError) -> None:
        """End this request with an error, from another task."""
        if self.failure is None and not self.ended and self._task is not None:
            self.failure = error
            self._task.cancel()

    def close(self) -> None:
        """Stop the task that detects a closed connection."""
        if self._watcher is not None:
            self._watcher.cancel()

    async def _start(self, status: int, headers: Iterable[Header]) -> None:
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [
                    (b"x-request-id", self.request_id.encode("ascii")),
                    *self.extra_headers,
                    *headers,
                ],
            }
        )

    async def _watch(self) -> None:
        """Cancel the task of the request when the client closes the connection."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self.ended and self._task is not None:
            self.left = True
            self._task.cancel()


__all__ = ["ClientLeftError", "Exchange", "Header"]
