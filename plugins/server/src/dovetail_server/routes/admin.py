"""The routes of operators: pause, resume, abort, prefix cache, sleep, profile.

They are served on a separate listener (`--admin-port`) or with a separate key (`--admin-key`), and
otherwise not at all.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from dovetail.errors import (
    CapacityError,
    DovetailError,
    EngineDeadError,
    StalledError,
    UnavailableError,
)
from dovetail.interfaces import PauseScope
from dovetail_server.protocol.errors import APIError
from dovetail_server.routes.table import Access, Handler, Route
from dovetail_server.state import ServerState
from dovetail_server.transport.exchange import Exchange

MAX_IDS = 10_000
SLEEP_TAGS = ("kv_cache", "weights")


def admin_routes(state: ServerState) -> list[Route]:
    """Return the routes."""
    routes = AdminRoutes(state)
    handlers: dict[str, Handler] = {
        "/pause": routes.pause,
        "/resume": routes.resume,
        "/abort": routes.abort,
        "/reset_prefix_cache": routes.reset_prefix_cache,
        "/sleep": routes.sleep,
        "/wake_up": routes.wake_up,
        "/start_profile": routes.start_profile,
        "/stop_profile": routes.stop_profile,
    }
    post_routes = [
        Route(method="POST", path=path, handler=handler, access=Access.ADMIN)
        for path, handler in handlers.items()
    ]
    return [
        *post_routes,
        Route(method="GET", path="/is_paused", handler=routes.is_paused, access=Access.ADMIN),
    ]


class AdminRoutes:
    """Handles requests of operators."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def pause(self, exchange: Exchange) -> None:
        """Hold requests until `resume`. The `scope` field is "all" or "new"."""
        scope = _choice(
            await _fields(exchange, "scope"), "scope", [str(PauseScope.ALL), str(PauseScope.NEW)]
        )
        await self._state.slot.llm.pause(scope)
        await exchange.respond({"paused": scope})

    async def resume(self, exchange: Exchange) -> None:
        """Serve requests again after `pause`."""
        await _fields(exchange)
        await self._state.slot.llm.resume()
        await exchange.respond({"paused": None})

    async def is_paused(self, exchange: Exchange) -> None:
        """Respond with the scope of the pause, or null."""
        paused = self._state.slot.llm.client.paused
        await exchange.respond({"paused": None if paused is None else str(paused)})

    async def abort(self, exchange: Exchange) -> None:
        """Abort the requests whose response ids the body lists. The `all` field aborts all."""
        fields = await _fields(exchange, "request_ids", "all")
        ids, everything = fields.get("request_ids", []), fields.get("all", False)
        if type(everything) is not bool:
            raise APIError("The field `all` must be a boolean.", code="invalid_type", param="all")
        if not isinstance(ids, list) or not all(isinstance(item, str) for item in ids):
            raise APIError(
                "request_ids must be a list of strings.", code="invalid_type", param="request_ids"
            )
        if not everything and not 0 < len(ids) <= MAX_IDS:
            raise APIError(
                f"request_ids must have 1 to {MAX_IDS} ids; or set all=true.", param="request_ids"
            )
        num_aborted = self._state.abort(ids, everything)
        num_aborted += await self._state.others.abort(ids, everything)
        await exchange.respond({"num_aborted": num_aborted})

    async def reset_prefix_cache(self, exchange: Exchange) -> None:
        """Drop all cached prefixes. The status 409 reports that requests are running."""
        await _fields(exchange)
        if not await self._state.slot.llm.reset_prefix_cache():
            raise APIError(
                "The prefix cache cannot be reset while requests are running.",
                status=409,
                code="requests_running",
            )
        await exchange.respond({"reset": True})

    async def sleep(self, exchange: Exchange) -> None:
        """Release device memory. The `level` field is 1 or 2."""
        level = (await _fields(exchange, "level")).get("level", 1)
        if type(level) is not int or level not in (1, 2):
            raise APIError("level must be 1 or 2.", param="level")
        await _run(self._state.slot.llm.sleep(level))
        await exchange.respond({"sleeping": True})

    async def wake_up(self, exchange: Exchange) -> None:
        """Allocate the released memory again. `tags` lists the kinds of memory; [] means all."""
        tags = (await _fields(exchange, "tags")).get("tags", [])
        if not isinstance(tags, list) or not all(tag in SLEEP_TAGS for tag in tags):
            raise APIError(f"tags must be a list of: {', '.join(SLEEP_TAGS)}.", param="tags")
        llm = self._state.slot.llm
        await _run(llm.wake_up(tags))
        # With one tag, the engine stays asleep until the other kind is allocated, too.
        await exchange.respond({"sleeping": llm.client.paused is not None})

    async def start_profile(self, exchange: Exchange) -> None:
        """Start recording a profile in every worker."""
        await self._profile(exchange, start=True)

    async def stop_profile(self, exchange: Exchange) -> None:
        """Stop profiling, and write the profiles."""
        await self._profile(exchange, start=False)

    async def _profile(self, exchange: Exchange, *, start: bool) -> None:
        await _fields(exchange)
        await _run(self._state.slot.llm.collective_rpc("profile", start))
        await exchange.respond({"profiling": start})


async def _run(operation: Awaitable[Any]) -> None:
    """Await an operation of the engine. Raise APIError if this engine does not support it."""
    try:
        await operation
    except (EngineDeadError, StalledError, UnavailableError):
        raise
    except CapacityError as error:
        raise APIError(str(error), status=503, code="out_of_memory") from None
    except DovetailError as error:
        raise APIError(str(error), code="unsupported_operation") from None


async def _fields(exchange: Exchange, *known: str) -> dict[str, Any]:
    """Return the fields of a body, which may be empty. Raise APIError for unknown fields."""
    fields = await exchange.read_object(may_be_empty=True)
    for name in fields:
        if name not in known:
            raise APIError(
                f"The field {name[:80]!r} is not known.", code="unknown_parameter", param=name[:80]
            )
    return {name: value for name, value in fields.items() if value is not None}


def _choice(fields: dict[str, Any], name: str, choices: list[str]) -> str:
    value = fields.get(name, choices[0])
    if value not in choices:
        raise APIError(f"{name} must be one of: {', '.join(choices)}.", param=name)
    return str(value)
