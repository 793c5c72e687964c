"""Tests of HTTP-routes plugins: the included plugin, and how the server checks other plugins."""

import asyncio

import pytest

from dovetail.errors import ConfigError, ContractError, RequestError
from dovetail.interfaces import HTTPResponse, HTTPRoute
from dovetail_devkit import load_suite
from dovetail_devkit.fakes.http_routes import FakeHTTPRoutes
from dovetail_server.props_routes import PropsRoutes
from dovetail_server.routes.plugin_routes import _checked
from dovetail_server.routes.table import RouteTable
from dovetail_server.settings import ServerSettings
from dovetail_server.transport.application import Application
from dovetail_server.transport.guard import Guard
from dovetail_server.transport.keys import KeyRing

OPEN = Guard(ServerSettings(host="0.0.0.0"), KeyRing(), KeyRing())


async def call(application, path, method="GET", body=b"", headers=()):
    """Return the status and the body of a request to an ASGI application."""
    scope = {"type": "http", "method": method, "path": path, "query_string": b"a=1&a=2&b="}
    sent = []
    messages = iter([{"type": "http.request", "body": body}])

    async def receive():
        return next(messages, None) or await asyncio.sleep(60, {"type": "http.disconnect"})

    async def send(message):
        sent.append(message)

    await application({**scope, "headers": list(headers)}, receive, send)
    return sent[0]["status"], b"".join(item.get("body", b"") for item in sent[1:])


def application_of(*routes):
    table = RouteTable(_checked("mine", route) for route in routes)
    return Application(table, OPEN, ServerSettings())


def test_the_included_routes_meet_their_contract():
    load_suite("http_routes")(PropsRoutes)


def test_the_route_plugin_of_this_package_is_used_only_if_it_is_enabled(server):
    info = server.get("/props").json
    assert info["model_alias"] == "demo"
    assert info["default_generation_settings"]["n_ctx"] == 512


def test_a_handler_gets_a_request_without_its_api_key_and_can_stream_the_response():
    seen = []

    async def handle(request):
        seen.append(request)

        async def pieces():
            yield b"one "
            yield b"two"

        return HTTPResponse(status=201, body=pieces())

    route = HTTPRoute(method="POST", path="/v1/x", handler=handle)
    headers = [(b"authorization", b"Bearer secret"), (b"x-a", b"b")]
    assert asyncio.run(call(application_of(route), "/v1/x", "POST", b"hi", headers)) == (
        201,
        b"one two",
    )
    (request,) = seen
    assert request.body == b"hi" and request.query == {"a": "1", "b": ""}
    assert dict(request.headers) == {"x-a": "b"}


@pytest.mark.parametrize(
    ("error", "status"),
    [(RequestError("no.", parameter="a"), 400), (ValueError("/a/secret/path"), 500)],
)
def test_an_error_of_a_handler_becomes_an_error_response(error, status):
    async def handle(request):
        raise error

    route = HTTPRoute(method="GET", path="/v1/x", handler=handle)
    actual, body = asyncio.run(call(application_of(route), "/v1/x"))
    assert actual == status and b"secret" not in body


def test_a_path_that_is_already_served_is_rejected():
    plugin = FakeHTTPRoutes(None)
    table = RouteTable(_checked("one", route) for route in plugin.routes())
    with pytest.raises(ConfigError, match="'two' is already a route of the plugin 'one'"):
        for route in plugin.routes():
            table.add(_checked("two", route))


@pytest.mark.parametrize("path", ["", "x", "/", "/a b", "/a/../b/", "/v1/*", "/a?b=c", None])
def test_an_invalid_path_is_rejected(path):
    with pytest.raises(ContractError, match="mine"):
        _checked("mine", HTTPRoute(method="GET", path=path, handler=FakeHTTPRoutes(None)._describe))
