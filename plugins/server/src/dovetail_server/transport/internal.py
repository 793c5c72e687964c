"""Calls the server's own routes without a connection, for example for a batch."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from dovetail_server.lifecycle.loop_probe import LoopProbe
from dovetail_server.protocol.errors import APIError
from dovetail_server.routes.table import Access, RouteTable
from dovetail_server.state import ServerState
from dovetail_server.transport.application import Application
from dovetail_server.transport.exchange import Exchange


@dataclass(kw_only=True)
class InternalResponse:
    """A response. headers: names in lower case."""

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


class InternalCalls:
    """Calls the routes of a table. A call passes the same steps as a request of a client.

    Such calls are background work: their requests have the lowest priority.
    """

    def __init__(
        self, table: RouteTable, state: ServerState, probe: LoopProbe | None = None
    ) -> None:
        self._table = table
        self._state = state
        self._probe = probe or LoopProbe()

    async def post(
        self, path: str, body: bytes, *, caller: str = "", request_id: str = ""
    ) -> InternalResponse:
        """Send a JSON body to a route and return the response.

        caller: name of the API key for which the call is made. request_id: the id of the response.
        """
        state = self._state
        application = Application(
            self._table,
            _InternalGuard(caller),
            state.settings,
            state.observers,
            self._probe,
            state.exchanges,
        )
        channel = _Channel(body)
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "headers": [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"x-request-id", request_id.encode("latin-1", "replace")),
            ],
        }
        await application(scope, channel.receive, channel.send)
        return channel.response


class _Channel:
    """The two callables of ASGI for one call whose response is collected."""

    def __init__(self, body: bytes) -> None:
        self.response = InternalResponse()
        self._body: bytes | None = body

    async def receive(self) -> Mapping[str, Any]:
        """Return the body once. Then wait, as for a client that stays connected."""
        if self._body is None:
            await asyncio.get_running_loop().create_future()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Collect a part of the response."""
        if message["type"] == "http.response.start":
            self.response.status = message["status"]
            self.response.headers = {
                name.decode("latin-1"): value.decode("latin-1")
                for name, value in message["headers"]
            }
        else:
            self.response.body += message.get("body", b"")


class _InternalGuard:
    """Accepts every request, on behalf of `caller`, to a route that clients may use."""

    def __init__(self, caller: str) -> None:
        self._caller = caller

    def check(self, exchange: Exchange, access: Access) -> None:
        """Set the caller of a request. Raise APIError for a route of operators."""
        if access is Access.ADMIN:
            raise APIError("The route is for operators only.", status=403, code="admin_route")
        exchange.caller = self._caller
        exchange.is_background = True

    def is_preflight(self, exchange: Exchange) -> bool:
        """Return False: no browser sends these calls."""
        return False

    async def respond_to_preflight(self, exchange: Exchange) -> None:
        """Do nothing."""
