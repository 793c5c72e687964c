"""The routes of the web page: its files, and the engine's steps for the live view."""

from __future__ import annotations

from importlib.resources import files
from urllib.parse import parse_qs

from dovetail.errors import UserError
from dovetail_server.protocol.errors import APIError
from dovetail_server.routes.table import Access, Route
from dovetail_server.state import ServerState
from dovetail_server.transport.exchange import Exchange, Header

PAGE = "index.html"
FILES = {
    PAGE: b"text/html; charset=utf-8",
    "page.css": b"text/css; charset=utf-8",
    "page.js": b"text/javascript; charset=utf-8",
    "chat.js": b"text/javascript; charset=utf-8",
    "live.js": b"text/javascript; charset=utf-8",
    "markdown.js": b"text/javascript; charset=utf-8",
    "server.js": b"text/javascript; charset=utf-8",
}
"""The files of the page with their media types. No other file is served."""
POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    b"img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: tuple[Header, ...] = (
    (b"content-security-policy", POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
)
MAX_QUERY_BYTES = 200
DEFAULT_STEPS = 256


def page_routes(state: ServerState) -> list[Route]:
    """Return the routes of the page, if the settings enable it, and the route /steps."""

    async def steps(exchange: Exchange) -> None:
        """Respond with what each request did in the last steps."""
        after, max_steps = _numbers(exchange.query)
        try:
            trace = await state.slot.llm.read_steps(after, max_steps)
        except UserError as error:
            raise APIError(str(error), param="after or max_steps") from None
        await exchange.respond(trace)

    routes = [Route(method="GET", path="/steps", handler=steps)]
    if not state.settings.no_web_page:
        routes += [_file_route(name, media_type) for name, media_type in FILES.items()]
    return routes


def _file_route(name: str, media_type: bytes) -> Route:
    """Return the route of a file of the page, which needs no key."""
    content = files(__package__).joinpath(name).read_bytes()
    headers = ((b"content-type", media_type), *HEADERS)

    async def serve(exchange: Exchange) -> None:
        """Respond with a file of the web page."""
        await exchange.respond_raw(200, headers, content)

    path = "/" if name == PAGE else f"/web/{name}"
    return Route(method="GET", path=path, handler=serve, access=Access.PUBLIC)


def _numbers(query: bytes) -> tuple[int, int]:
    """Return `after` and `max_steps` of a query. Raise APIError for other contents."""
    fields = parse_qs(query[:MAX_QUERY_BYTES].decode("latin-1"), keep_blank_values=True)
    numbers = {"after": 0, "max_steps": DEFAULT_STEPS}
    for name, values in fields.items():
        if name not in numbers:
            continue
        value = values[-1]
        if not (value.isascii() and value.isdigit() and len(value) <= 18):
            raise APIError(f"{name} must be an integer of at least 0.", param=name)
        numbers[name] = int(value)
    return numbers["after"], numbers["max_steps"]
