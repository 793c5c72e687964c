"""The connections of the server: uvicorn's protocol with limits on sizes and times.

Headers and bodies have a deadline, and a client that does not read its response is disconnected.
All checks are timers of a connection, so streamed tokens have no additional cost. A connection that
closes before its request has arrived continues to read for a short time: otherwise, the kernel
resets the connection and the client may lose the response.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from dovetail_server.protocol.errors import APIError
from dovetail_server.settings import ServerSettings

_NO_LINGER = struct.pack("ii", 1, 0)
_UNREAD_TIMEOUT_S = 2.0
"""Time in which a connection that closes reads the rest of a request."""
_FIRST_REQUEST_TIMEOUT_S = 0.5
"""Time in which the first request of a connection may arrive while the server shuts down."""

_CONNECTIONS_FULL = APIError(
    "The server has too many open connections. Try again later.",
    status=503,
    code="too_many_connections",
    retry_after_s=1.0,
)
_NOT_HTTP = APIError("The request is not valid HTTP/1.1.", code="invalid_http")
_TOO_LARGE = APIError(
    "The request line and the headers are too long.", status=431, code="headers_too_large"
)
_TOO_SLOW = APIError(
    "The request did not arrive within the time limit of the server.",
    status=408,
    code="request_too_slow",
)


def limited_protocol(settings: ServerSettings) -> type[HttpToolsProtocol]:
    """Return the class of the connections of a server."""
    return type("LimitedConnection", (Connection,), {"settings": settings})


class Connection(HttpToolsProtocol):
    """A connection with limits. settings: set in the subclass of a server."""

    settings: ServerSettings

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_header_bytes = 0
        self._error = _NOT_HTTP
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None
        self._receives = False
        self._closes = False
        self._shuts_down = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Reject the connection if there are too many. Otherwise wait for its headers."""
        super().connection_made(transport)
        if len(self.connections) > self.settings.max_connections:
            self._reject(_CONNECTIONS_FULL)
        else:
            self._expect(self.settings.header_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers."""
        self._expect(None)
        self._stop_write_timer()
        super().connection_lost(exc)
        if self.cycle is not None:
            self.cycle.transport = self.transport  # so that no reference cycle remains

    def data_received(self, data: bytes) -> None:
        """Parse data of the client. Discard it if the connection closes."""
        if not self._closes:
            super().data_received(data)

    def on_message_begin(self) -> None:
        """Start the time limit of the headers."""
        self._num_header_bytes = 0
        self._expect(self.settings.header_timeout_s)
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Count the bytes of the request line."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count the bytes of a header."""
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the time limit of the body."""
        self._expect(self.settings.body_timeout_s)
        self._receives = True
        super().on_headers_complete()
        if self.cycle is not None:
            self.cycle.transport = _RequestTransport(self)
            self.cycle.keep_alive = self.cycle.keep_alive and not self._shuts_down

    def on_message_complete(self) -> None:
        """Cancel the timer for reading the body."""
        self._expect(None)
        self._receives = False
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Reject data that cannot be parsed."""
        self._reject(self._error)

    def shutdown(self) -> None:
        """Close the connection after the running request.

        A connection that has not received a request waits for the first one and rejects it, so that
        the client learns the reason.
        """
        self._shuts_down = True
        if self.cycle is None and not self.transport.is_closing():
            self._expect(_FIRST_REQUEST_TIMEOUT_S)
        else:
            super().shutdown()

    def close_after_request(self) -> None:
        """Close the connection. If its request is incomplete, first discard the rest of it."""
        if not self._receives:
            self.transport.close()
            return
        self._closes = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._expect(_UNREAD_TIMEOUT_S)

    def allow_body_time(self, seconds: float) -> None:
        """Restart the time limit of a body that is being received."""
        if self._receives:
            self._expect(seconds)

    def pause_writing(self) -> None:
        """Start the time limit of a client that does not read."""
        super().pause_writing()
        self._stop_write_timer()
        self._writing = self.loop.call_later(self.settings.write_timeout_s, self._drop)

    def resume_writing(self) -> None:
        """Cancel the write timer, because the client reads again."""
        self._stop_write_timer()
        super().resume_writing()

    def _count(self, num_bytes: int) -> None:
        self._num_header_bytes += num_bytes
        if self._num_header_bytes > self.settings.max_header_bytes:
            self._error = _TOO_LARGE
            raise httptools.HttpParserError("the headers are too long")

    def _expect(self, seconds: float | None) -> None:
        """Set the time in which the next part of a request must arrive, or None for no limit."""
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        if seconds is not None:
            self._reading = self.loop.call_later(seconds, self._expire)

    def _expire(self) -> None:
        self._reading = None
        if self._closes or (self._shuts_down and self.cycle is None):
            self.transport.close()
        elif self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()  # the running request is notified of the disconnect
        elif not self.transport.is_closing():
            self._reject(_TOO_SLOW)

    def _reject(self, error: APIError) -> None:
        """Write an error response without a request, and close the connection."""
        body = msgspec.json.encode(error.body(""))
        lines = [*self.server_state.default_headers, *error.headers()]
        lines += [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        head = b"".join(b"%b: %b\r\n" % line for line in lines)
        self.transport.write(STATUS_LINE[error.status] + head + b"\r\n" + body)
        self.transport.close()

    def _drop(self) -> None:
        """Close the connection immediately, without sending data in the kernel's buffer."""
        connection = self.transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self.transport.abort()

    def _stop_write_timer(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None


class _RequestTransport:
    """A wrapper of the transport for the handler of one request."""

    def __init__(self, connection: Connection) -> None:
        self.write = connection.transport.write
        self.is_closing = connection.transport.is_closing
        self.close = connection.close_after_request
        self.allow_body_time = connection.allow_body_time
