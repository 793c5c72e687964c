"""The routes of the web page: its files, and the engine's steps for the live view."""

from __future__ import annotations

import asyncio
from importlib.resources import files
from urllib.parse import parse_qs

from dovetail.engine.step_trace.records import StepTrace
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
    b"img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    b"require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS: tuple[Header, ...] = (
    (b"content-security-policy", POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
)
MAX_QUERY_BYTES = 200
DEFAULT_STEPS = 256
MIN_READ_PERIOD_S = 0.1
"""Minimum time between two reads of the engine's steps, which limits the load on the engine."""
MAX_READERS = 16


class StepReader:
    """Reads the engine's steps for all clients of this process, one after another."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._lock = asyncio.Lock()
        self._num_readers = 0
        self._next_s = 0.0

    async def read(self, after: int, max_steps: int) -> StepTrace:
        """Return the steps with numbers above `after`. Raise APIError if too many clients wait."""
        if self._num_readers >= MAX_READERS:
            message = f"{MAX_READERS} clients are already waiting for steps. Try again later."
            raise APIError(message, status=429, code="too_many_readers", retry_after_s=1.0)
        self._num_readers += 1
        try:
            async with self._lock:
                loop = asyncio.get_running_loop()
                await asyncio.sleep(self._next_s - loop.time())
                self._next_s = loop.time() + MIN_READ_PERIOD_S
                return await self._state.slot.llm.read_steps(after, max_steps)
        except UserError as error:
            raise APIError(str(error), param="max_steps") from None
        finally:
            self._num_readers -= 1


def page_routes(state: ServerState) -> list[Route]:
    """Return the routes of the page, if the settings enable it, and the route /steps."""
    reader = StepReader(state)

    async def steps(exchange: Exchange) -> None:
        """Respond with what each request did in the last steps."""
        await exchange.respond(await reader.read(*_numbers(exchange.query)))

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
    kind = media_type.decode().partition(";")[0]
    return Route(method="GET", path=path, handler=serve, access=Access.PUBLIC, media_type=kind)


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
