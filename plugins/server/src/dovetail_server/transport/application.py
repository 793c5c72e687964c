"""The ASGI application: finds the route of each request, and turns errors into responses.

It uses plain ASGI, without a web framework. Every request passes the same steps in the same order:
id, key, route, handler. An exception ends only its own request.
"""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from dovetail.errors import DovetailError
from dovetail_server.lifecycle.loop_probe import LoopProbe
from dovetail_server.observers import Observers
from dovetail_server.protocol.errors import APIError, api_error
from dovetail_server.routes.table import Access, RouteTable
from dovetail_server.settings import ServerSettings
from dovetail_server.transport.body import BodyReader, ClientLeftError
from dovetail_server.transport.exchange import Exchange, Send
from dovetail_server.transport.pacing import StartPacer

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
"""Client ids that a response contains unchanged. The engine never uses them."""


class RequestGuard(Protocol):
    """Checks requests before their routes run."""

    def check(self, exchange: Exchange, access: Access) -> None:
        """Raise APIError if the request must not be served."""

    def is_preflight(self, exchange: Exchange) -> bool:
        """Whether this is a CORS preflight request of a browser."""

    async def respond_to_preflight(self, exchange: Exchange) -> None:
        """Send the response to a CORS preflight request."""


class Application:
    """The application of one listener. exchanges: contains the requests that are being served."""

    def __init__(
        self,
        table: RouteTable,
        guard: RequestGuard,
        settings: ServerSettings,
        observers: Observers | None = None,
        probe: LoopProbe | None = None,
        exchanges: set[Exchange] | None = None,
    ) -> None:
        self._exchanges = set() if exchanges is None else exchanges
        self._probe = probe or LoopProbe()
        self._observers = observers or Observers()
        self._table = table
        self._guard = guard
        self._settings = settings
        self._bodies = BodyReader(settings)
        self._pacer = StartPacer()

    async def __call__(
        self,
        scope: Mapping[str, Any],
        receive: Callable[[], Awaitable[Mapping[str, Any]]],
        send: Send,
    ) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return
        exchange = Exchange(scope, receive, send, self._bodies, self._settings)
        request_id = exchange.headers.get("x-request-id", "")
        exchange.request_id = (
            request_id if _REQUEST_ID.fullmatch(request_id) else f"req-{uuid.uuid4().hex}"
        )
        self._exchanges.add(exchange)
        try:
            with self._probe.watch():
                await self._pacer.wait()
                await self._serve(exchange)
        finally:
            self._exchanges.discard(exchange)
            exchange.close()

    async def _serve(self, exchange: Exchange) -> None:
        error: Exception
        try:
            if self._guard.is_preflight(exchange):
                await self._guard.respond_to_preflight(exchange)
                return
            handler, access = self._table.find(exchange)
            self._guard.check(exchange, access)
            await handler(exchange)
            return
        except asyncio.CancelledError:
            if exchange.failure is None and not exchange.left:
                raise
            _uncancel()
            error = exchange.failure or ClientLeftError()
        except Exception as caught:
            error = caught
        if isinstance(error, ClientLeftError) or exchange.left:
            return
        if not isinstance(error, APIError | DovetailError):
            logger.error("request %s failed", exchange.request_id, exc_info=error)
        rejection = api_error(error)
        if not exchange.response_id:  # it was not accepted
            self._observers.rejected(exchange.path, rejection.status, rejection.code)
        await exchange.fail(rejection)


def _uncancel() -> None:
    task = asyncio.current_task()
    while task is not None and task.cancelling():
        task.uncancel()
