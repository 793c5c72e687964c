"""Sends requests to one server and reuses its connections."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass, field
from typing import Any

import msgspec

from dovetail.cli.client.connection import Server
from dovetail.errors import ConfigError
from dovetail_client_tools.http_client.connection import CallError, Connection, Receiver

CONNECT_TIMEOUT_S = 10.0
MAX_BODY_BYTES = 16 << 20
"""Maximum size of a response that is read as a whole."""

_PORTS = {"http": 80, "https": 443}


@dataclass
class Response:
    """A complete response. headers: names in lower case."""

    max_bytes: int = MAX_BODY_BYTES
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    content: bytearray = field(default_factory=bytearray)

    def start(self, status: int, headers: dict[str, str]) -> None:
        """Store status and headers."""
        self.status, self.headers = status, headers

    def feed(self, data: bytes) -> None:
        """Append a part of the body. Raise CallError if the body is too large."""
        if len(self.content) + len(data) > self.max_bytes:
            raise CallError("malformed", f"The response has more than {self.max_bytes:,} bytes.")
        self.content += data

    def json(self) -> Any:
        """Return the value of the body. Raise CallError if the body is not JSON."""
        try:
            return msgspec.json.decode(self.content)
        except (msgspec.DecodeError, ValueError, RecursionError):
            raise CallError("malformed", "The response is not JSON.") from None


class HTTPClient:
    """A client of one server, for one event loop."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._idle: list[Connection] = []
        self._tls = ssl.create_default_context() if server.scheme == "https" else None
        self._port = server.port or _PORTS[server.scheme]
        self._head = _fixed_headers(server, self._port)

    async def get(
        self, path: str, *, timeout_s: float, max_bytes: int = MAX_BODY_BYTES
    ) -> Response:
        """Return the response to a GET request. Raise CallError if none arrives in time."""
        return await self._whole("GET", path, b"", timeout_s, max_bytes)

    async def post(
        self, path: str, body: bytes, *, timeout_s: float, max_bytes: int = MAX_BODY_BYTES
    ) -> Response:
        """Return the response to a JSON body. Raise CallError if none arrives in time."""
        return await self._whole("POST", path, body, timeout_s, max_bytes)

    async def _whole(
        self, method: str, path: str, body: bytes, timeout_s: float, max_bytes: int
    ) -> Response:
        response = Response(max_bytes)
        await self.send(self.request(method, path, body), response, timeout_s=timeout_s)
        return response

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Return the bytes of a request. path: without the prefix of the server."""
        line = f"{method} {self.server.prefix}{path} HTTP/1.1\r\n".encode("latin-1", "replace")
        length = b"content-length: %d\r\n\r\n" % len(body) if method == "POST" else b"\r\n"
        return b"".join((line, self._head, length, body))

    async def send(self, request: bytes, receiver: Receiver, *, timeout_s: float) -> None:
        """Send a request; its response goes to `receiver`.

        A request that an idle connection could not carry is sent again on a new connection. Raises
        CallError.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._send(request, receiver)
        except TimeoutError:
            raise CallError("timeout", f"No complete response within {timeout_s:g} s.") from None

    async def _send(self, request: bytes, receiver: Receiver) -> None:
        while True:
            idle = self._pop_idle()
            connection = idle or await self._connect()
            try:
                await connection.send(request, receiver)
            except CallError:
                if idle is not None and not connection.has_started:
                    continue  # the server had closed the idle connection
                raise
            if connection.is_usable:
                self._idle.append(connection)
            else:
                connection.close()
            return

    def _pop_idle(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable:
                return connection
        return None

    async def _connect(self) -> Connection:
        loop, server = asyncio.get_running_loop(), self.server
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(
                    Connection, server.host, self._port, ssl=self._tls
                )
        except TimeoutError:
            message = f"{server.url} accepted no connection within {CONNECT_TIMEOUT_S:g} s."
            raise CallError("connect", message) from None
        except (OSError, ssl.SSLError) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise CallError("connect", f"{server.url} cannot be reached: {reason}.") from None
        return connection

    def close(self) -> None:
        """Close all idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()


def _fixed_headers(server: Server, port: int) -> bytes:
    try:
        host = f"[{server.host}]" if ":" in server.host else server.host.encode("idna").decode()
    except UnicodeError:
        raise ConfigError(f"--url {server.url} does not have a valid host name.") from None
    lines = [f"host: {host}:{port}", "content-type: application/json", "accept: */*"]
    if server.api_key:
        lines.append(f"authorization: Bearer {server.api_key}")
    return "".join(f"{line}\r\n" for line in lines).encode("latin-1")
