"""One HTTP/1.1 connection, which carries one request at a time.

The parser is httptools. Received bytes go directly to a receiver, so nothing is stored here.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

import httptools

MAX_HEAD_BYTES = 64 << 10
"""Maximum size of status line and headers."""


class CallError(Exception):
    """A request without a complete, valid response.

    kind: a word or two for counts, such as "connect" or "status 503".
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Receiver(Protocol):
    """Receives one response. A method may raise CallError, which closes the connection."""

    def start(self, status: int, headers: dict[str, str]) -> None:
        """Handle status and headers; names are in lower case."""

    def feed(self, data: bytes) -> None:
        """Handle a part of the body."""


class Connection(asyncio.Protocol):
    """A connection. has_started: whether a byte of the current response has arrived."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._receiver: Receiver | None = None
        self._done: asyncio.Future[None] | None = None
        self._keeps_alive = False
        self._reset()

    def _reset(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._num_head_bytes = 0
        self.has_started = False
        self._in_head = True

    @property
    def is_usable(self) -> bool:
        """Whether the connection can carry another request."""
        transport = self._transport
        return self._keeps_alive and transport is not None and not transport.is_closing()

    async def send(self, request: bytes, receiver: Receiver) -> None:
        """Send a request and wait for the end of its response.

        Raises CallError if the connection or the receiver fails. `has_started` is then False if no
        byte of a response has arrived.
        """
        assert self._transport is not None and self._done is None
        self._reset()
        self._receiver = receiver
        done = self._done = asyncio.get_running_loop().create_future()
        if self._transport.is_closing():
            self._fail(CallError("disconnected", "The server closed the connection."))
        else:
            self._transport.write(request)
        try:
            await done
        except BaseException:
            self.close()
            raise
        finally:
            self._receiver = self._done = None

    def close(self) -> None:
        """Close the connection."""
        self._keeps_alive = False
        if self._transport is not None:
            self._transport.abort()

    # --- callbacks of asyncio -----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        self._transport = transport  # type: ignore[assignment]  # uvloop has its own class

    def data_received(self, data: bytes) -> None:
        """Parse a part of the response."""
        if self._done is None or self._done.done():
            self.close()  # bytes that belong to no request
            return
        self.has_started = True
        if self._in_head:
            self._num_head_bytes += len(data)
        try:
            self._parser.feed_data(data)
            if self._in_head and self._num_head_bytes > MAX_HEAD_BYTES:
                raise CallError("malformed", "The headers of the response are too large.")
        except CallError as error:
            self._fail(error)
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            self._fail(cause if isinstance(cause, CallError) else _malformed(error))
        except httptools.HttpParserError as error:
            self._fail(_malformed(error))

    def connection_lost(self, error: Exception | None) -> None:
        """End the response. A response without a length ends when the connection is closed."""
        self._keeps_alive = False
        headers = self._headers
        is_endless = not self._in_head and not (
            "content-length" in headers or "transfer-encoding" in headers
        )
        if is_endless and error is None:
            self._finish()
        else:
            message = "The server closed the connection before the response ended."
            self._fail(CallError("disconnected", message))

    # --- callbacks of the parser --------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header."""
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Notify the receiver of status and headers."""
        status = self._parser.get_status_code()
        if status >= 200 and self._receiver is not None:
            self._in_head = False
            self._receiver.start(status, self._headers)

    def on_body(self, data: bytes) -> None:
        """Notify the receiver of a part of the body."""
        if self._receiver is not None:
            self._receiver.feed(data)

    def on_message_complete(self) -> None:
        """End the response, unless it is an interim response (1xx)."""
        if self._in_head:
            self._headers.clear()
            return
        self._keeps_alive = self._parser.should_keep_alive()
        self._finish()

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _fail(self, error: CallError) -> None:
        self._keeps_alive = False
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
        if self._transport is not None:
            self._transport.abort()


def _malformed(error: Exception) -> CallError:
    return CallError("malformed", f"The response is not valid HTTP: {error}.")
