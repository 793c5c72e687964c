"""The conformance suite of the HTTP routes contract. No server is needed.

The suite sends an empty request to every GET route, invalid bodies to all other routes, and the
requests in the attribute `examples` of the class, if it has this attribute.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.errors import DovetailError, RequestError
from dovetail.interfaces.http_routes import (
    HTTPRequest,
    HTTPResponse,
    HTTPRoute,
    HTTPRoutes,
    HTTPRoutesContext,
)
from dovetail_devkit.expectation import checking, expect
from dovetail_devkit.fakes.http_routes import FakeAsyncEngine

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
INVALID_BODIES = (b"", b"\xff\x00", b"{", b"[" * 100_000, b'{"unknown": 1e999}', b"null")
DEADLINE_S = 30.0
_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)+")


@checking("http_routes")
def check_http_routes(
    routes_cls: type[HTTPRoutes],
    *,
    requests: Sequence[HTTPRequest] | None = None,
    engine: object = None,
    options: Mapping[str, object] | None = None,
) -> None:
    """Check a plugin of routes. Raise AssertionError with the violated rule.

    requests: valid requests; None for the plugin's `examples`. engine: None for a fake engine.
    """
    if requests is None:
        requests = getattr(routes_cls, "examples", ())
    context = HTTPRoutesContext(
        served_model_name="a model",
        engine=FakeAsyncEngine() if engine is None else engine,
        options=options or {},
    )
    plugin = routes_cls(context)
    routes = plugin.routes()
    _check_table(routes)
    asyncio.run(_check_handlers(routes, requests))
    for _ in range(2):
        expect(
            plugin.close() is None, "close() must return None, also if it is called a second time"
        )
    unused = routes_cls(context)
    unused.close()


def _check_table(routes: Any) -> None:
    valid = isinstance(routes, Sequence) and not isinstance(routes, str)
    expect(valid, f"routes() returned {routes!r:.100}; it must return a sequence")
    expect(bool(routes), "routes() must return at least one route")
    for route in routes:
        expect(isinstance(route, HTTPRoute), f"routes() contains {route!r:.100}, not an HTTPRoute")
        expect(
            route.method in METHODS, f"the HTTP method {route.method!r:.40} is not one of {METHODS}"
        )
        path = isinstance(route.path, str) and _PATH.fullmatch(route.path)
        expect(bool(path), f"{route.path!r:.80} is not a path such as /v1/name")
        expect(
            inspect.iscoroutinefunction(route.handler),
            f"the handler of {route.path} must be an async function",
        )
        expect(isinstance(route.public, bool), f"`public` of {route.path} must be a bool")
    keys = [(route.method, route.path) for route in routes]
    expect(len(set(keys)) == len(keys), f"routes() contains a route twice: {sorted(keys)}")


async def _check_handlers(routes: Sequence[HTTPRoute], requests: Sequence[HTTPRequest]) -> None:
    handlers = {(route.method, route.path): route.handler for route in routes}
    for request in requests:
        key = request.method, request.path
        expect(key in handlers, f"the example {key} is not a route of the plugin")
        response = await _answer(handlers[key], request)
        expect(
            response.status < 400,
            f"the response to the example {key} has the status {response.status}",
        )
    for (method, path), handler in handlers.items():
        bodies = (b"",) if method == "GET" else INVALID_BODIES
        for body in bodies:
            request = HTTPRequest(method=method, path=path, query={}, headers={}, body=body)
            try:
                await _answer(handler, request)
            except RequestError:
                continue


async def _answer(handler: Any, request: HTTPRequest) -> HTTPResponse:
    """Return the checked response. Raises RequestError of the handler."""
    description = f"{request.method} {request.path} with the body {request.body[:20]!r}"
    try:
        response: HTTPResponse = await asyncio.wait_for(handler(request), DEADLINE_S)
    except DovetailError:
        raise
    except Exception as error:
        raise AssertionError(
            f"{description}: the handler raised {error!r:.200}; it must raise RequestError for an "
            "invalid request"
        ) from error
    expect(
        isinstance(response, HTTPResponse),
        f"{description}: the handler returned {response!r:.80}, not an HTTPResponse",
    )
    expect(
        type(response.status) is int and 200 <= response.status < 600,
        f"{description}: the response has the invalid status {response.status!r:.40}",
    )
    texts = [text for pair in response.headers.items() for text in pair]
    valid = all(isinstance(text, str) and text.isprintable() for text in texts)
    expect(valid, f"{description}: header names and values must be printable strings")
    if isinstance(response.body, bytes):
        return response
    expect(
        hasattr(response.body, "__aiter__"), f"{description}: the body must be bytes or an iterator"
    )
    async for piece in response.body:
        expect(
            isinstance(piece, bytes), f"{description}: the body contains {piece!r:.40}, not bytes"
        )
    return response
