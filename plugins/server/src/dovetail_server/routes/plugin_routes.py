"""The routes of HTTP-routes plugins (`--http-routes`), served through `Exchange`."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import parse_qsl

from dovetail.engine.async_llm import AsyncLLM
from dovetail.engine.plugin_choices import make_registry
from dovetail.errors import ContractError
from dovetail.interfaces import (
    HTTPRequest,
    HTTPResponse,
    HTTPRoute,
    HTTPRoutes,
    HTTPRoutesContext,
)
from dovetail.plugins.construction import Options, make_instance
from dovetail_server.lifecycle.engine_slot import EngineSlot
from dovetail_server.protocol.errors import APIError
from dovetail_server.routes.table import METHODS, Access, Route
from dovetail_server.transport.exchange import Exchange, Header

logger = logging.getLogger(__name__)

SECRET_HEADERS = ("authorization", "x-api-key", "cookie")
MAX_QUERY_FIELDS = 100

_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)+")
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e]*")
_SERVER_HEADERS = frozenset({"content-length", "transfer-encoding", "connection", "x-request-id"})


class CurrentEngine:
    """The engine for plugins: an API process gets a new `AsyncLLM` when the engine is restarted."""

    def __init__(self, first: AsyncLLM, slot: EngineSlot) -> None:
        """first: the engine to use until `slot` has loaded one."""
        self._first = first
        self._slot = slot

    def __getattr__(self, name: str) -> Any:
        llm = self._slot.llm if self._slot.is_loaded else self._first
        return getattr(llm, name)


class PluginRoutes:
    """The HTTP-routes plugins of a server."""

    def __init__(self, llm: AsyncLLM, slot: EngineSlot) -> None:
        """Create the plugins. Raise a DovetailError that names a failed plugin."""
        engine = CurrentEngine(llm, slot)
        self._plugins: list[tuple[str, HTTPRoutes]] = []
        registry = make_registry(llm.config)

        def context(own: Options) -> HTTPRoutesContext:
            name = slot.served_model_name
            return HTTPRoutesContext(served_model_name=name, engine=engine, options=own)

        for reference in llm.config.extensions.http_routes:
            instance: HTTPRoutes = make_instance(registry, "http_routes", reference, context)
            self._plugins.append((str(reference), instance))

    def routes(self) -> Iterable[Route]:
        """Yield the checked routes of all plugins. Raise ContractError for an invalid one."""
        for name, plugin in self._plugins:
            for route in plugin.routes():
                yield _checked(name, route)

    def close(self) -> None:
        """Close the plugins. Log their errors."""
        for name, plugin in self._plugins:
            try:
                plugin.close()
            except Exception as error:
                logger.warning("The HTTP routes of %r could not be closed: %r", name, error)
        self._plugins.clear()


def _checked(name: str, route: object) -> Route:
    owner = f"the plugin {name!r}"
    if not isinstance(route, HTTPRoute):
        raise ContractError(f"{owner} returns {route!r:.80} as a route; it must be an HTTPRoute.")
    if route.method not in METHODS or not _PATH.fullmatch(str(route.path)):
        raise ContractError(
            f"{owner} has the route {route.method!r:.20} {route.path!r:.80}; use one of "
            f"{', '.join(METHODS)} and a path such as /v1/name."
        )

    async def handle(exchange: Exchange) -> None:
        response = await route.handler(await _request(exchange))
        await _respond(exchange, response)

    return Route(
        method=route.method,
        path=route.path,
        handler=handle,
        access=Access.PUBLIC if route.public else Access.KEY,
        owner=owner,
        media_type="*/*",
    )


async def _request(exchange: Exchange) -> HTTPRequest:
    query = exchange.query.decode("latin-1")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=MAX_QUERY_FIELDS)
    except ValueError:
        raise APIError(f"The query string has more than {MAX_QUERY_FIELDS} parameters.") from None
    headers = {n: v for n, v in exchange.headers.items() if n not in SECRET_HEADERS}
    return HTTPRequest(
        method=exchange.method,
        path=exchange.path,
        query=dict(reversed(pairs)),
        headers=headers,
        body=await exchange.read_body(),
    )


async def _respond(exchange: Exchange, response: object) -> None:
    if not isinstance(response, HTTPResponse) or not 200 <= response.status < 600:
        raise ContractError(
            f"{exchange.path}: the handler returned {response!r:.80}, not a valid HTTPResponse."
        )
    headers = list(_headers(response.headers))
    if isinstance(response.body, bytes):
        await exchange.respond_raw(response.status, headers, response.body)
        return
    await exchange.start_stream(headers, response.status)
    async for piece in response.body:
        if piece:
            await exchange.write(piece)
    await exchange.end()


def _headers(headers: Mapping[str, str]) -> Iterable[Header]:
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
            raise ContractError(f"the header {name!r:.80} of a route is not valid.")
        if name.lower() not in _SERVER_HEADERS:
            yield name.lower().encode(), value.encode()
