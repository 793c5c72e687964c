"""The table of routes: paths and methods as data."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from dovetail.errors import ConfigError
from dovetail_server.protocol.errors import OPENAI_ERRORS, APIError, ErrorForm

if TYPE_CHECKING:
    from dovetail_server.transport.exchange import Exchange

Handler = Callable[["Exchange"], Awaitable[None]]


class Access(Enum):
    """Access levels of a route: everyone, clients with a key, or operators with the admin key."""

    PUBLIC = "public"
    KEY = "key"
    ADMIN = "admin"


METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
JSON = "application/json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A route.

    path: the exact path; a path that ends with "/*" matches everything below it, and "*" between
    two slashes matches one name. access: who may use it. owner: who provides it. errors: the form
    of its errors. media_type: of its responses, without parameters; "*/*" for any.
    """

    method: str
    path: str
    handler: Handler
    access: Access = Access.KEY
    owner: str = "the server"
    errors: ErrorForm = OPENAI_ERRORS
    media_type: str = JSON


class RouteTable:
    """The routes of one listener."""

    def __init__(self, routes: Iterable[Route] = ()) -> None:
        self._routes: dict[str, dict[str, Route]] = {}
        for route in routes:
            self.add(route)

    def add(self, route: Route) -> None:
        """Add a route. Raise ConfigError if its path and method are taken."""
        methods = self._routes.setdefault(route.path, {})
        if (other := methods.get(route.method)) is not None:
            raise ConfigError(
                f"{route.method} {route.path} of {route.owner} is already a route of "
                f"{other.owner}. Remove one of them."
            )
        methods[route.method] = route

    def routes(self) -> list[Route]:
        """Return all routes, by path and method."""
        return [
            methods[method] for _, methods in sorted(self._routes.items()) for method in methods
        ]

    def find(self, exchange: Exchange) -> tuple[Handler, Access]:
        """Return the handler for a request, and who may use it.

        An unknown path or method gets a handler that raises the error, so that a client without a
        key does not learn which paths exist.
        """
        methods = (
            self._routes.get(exchange.path)
            or self._find_inner(exchange)
            or self._find_parent(exchange)
        )
        if methods is None:
            return _no_path, Access.KEY
        exchange.errors = next(iter(methods.values())).errors
        method = "GET" if exchange.method == "HEAD" else exchange.method
        route = methods.get(method)
        if route is None:
            return _no_method(methods), next(iter(methods.values())).access
        return route.handler, route.access

    def _find_inner(self, exchange: Exchange) -> dict[str, Route] | None:
        """Return the routes of a path such as "/v1/responses/*/cancel"."""
        parent, _, last = exchange.path.rpartition("/")
        start, _, name = parent.rpartition("/")
        methods = self._routes.get(f"{start}/*/{last}") if name and last != "*" else None
        if methods is not None:
            exchange.rest = name
        return methods

    def _find_parent(self, exchange: Exchange) -> dict[str, Route] | None:
        parent, slash, rest = exchange.path, "", ""
        while parent:
            parent, slash, end = parent.rpartition("/")
            rest = f"{end}/{rest}" if rest else end
            if slash and rest and (methods := self._routes.get(f"{parent}/*")) is not None:
                exchange.rest = rest
                return methods
        return None


async def _no_path(exchange: Exchange) -> None:
    raise APIError(
        f"The server has no route {route_name(exchange.path)!r}; openapi.json lists all routes.",
        status=404,
        code="unknown_route",
    )


def route_name(path: str) -> str:
    """Return a path for messages. Paths with a leading slash are hidden in messages."""
    return path[:80].lstrip("/")


def _no_method(methods: dict[str, Route]) -> Handler:
    allowed = ", ".join(sorted(methods))

    async def reject(exchange: Exchange) -> None:
        exchange.extra_headers.append((b"allow", allowed.encode()))
        raise APIError(
            f"The method {exchange.method[:20]} is not supported here; use {allowed}.",
            status=405,
            code="method_not_allowed",
        )

    return reject
