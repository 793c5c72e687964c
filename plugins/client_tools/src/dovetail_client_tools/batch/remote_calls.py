"""Sends the requests of a batch to a server."""

from __future__ import annotations

import asyncio

import msgspec

from dovetail.cli.client.connection import Server
from dovetail.errors import ConfigError, RequestError
from dovetail_client_tools.http_client.client import HTTPClient, Response
from dovetail_client_tools.http_client.connection import CallError
from dovetail_server.transport.internal import InternalResponse

MAX_RESPONSE_BYTES = 32 << 20
UNAUTHORIZED = 401
MAX_ATTEMPTS = 5
"""Maximum number of attempts while the server cannot be reached."""
FIRST_WAIT_S = 0.5


class ServerLostError(ConfigError):
    """The server cannot be reached, so the run ends and can be resumed."""


class RemoteCalls:
    """Calls the routes of a server, with the interface of `InternalCalls`."""

    def __init__(self, server: Server, *, timeout_s: float) -> None:
        self._client = HTTPClient(server)
        self._server = server
        self._timeout_s = timeout_s
        self._has_responded = False

    async def post(
        self, path: str, body: bytes, *, caller: str = "", request_id: str = ""
    ) -> InternalResponse:
        """Send a JSON body to a route and return the response.

        caller, request_id: not sent. Raises ServerLostError if the server cannot be reached: after
        `MAX_ATTEMPTS` attempts if it has responded before, otherwise at once. Raises RequestError
        if the server sends no valid response.
        """
        for attempt in range(MAX_ATTEMPTS):
            try:
                response = await self._client.post(
                    path, body, timeout_s=self._timeout_s, max_bytes=MAX_RESPONSE_BYTES
                )
                self._has_responded = True
                return self._checked(response)
            except CallError as error:
                if error.kind not in ("connect", "disconnected"):
                    raise RequestError(f"{error}") from None
                lost = error
            if not self._has_responded:
                break
            await asyncio.sleep(FIRST_WAIT_S * 2**attempt)
        raise ServerLostError(f"{lost}")

    def _checked(self, response: Response) -> InternalResponse:
        if response.status == UNAUTHORIZED:
            raise ServerLostError(
                f"{self._server.url} rejects the API key. Pass the correct key with --api-key-file."
            )
        value = response.json()
        # A record is one line.
        body = msgspec.json.encode(value) if b"\n" in response.content else bytes(response.content)
        return InternalResponse(status=response.status, headers=response.headers, body=body)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()
