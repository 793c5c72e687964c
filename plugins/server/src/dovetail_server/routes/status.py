"""The routes for health, version, load and models."""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any

from dovetail_server.protocol.errors import APIError, unavailable
from dovetail_server.routes.table import Access, Route
from dovetail_server.state import ServerState
from dovetail_server.transport.exchange import Exchange

RETRY_AFTER_S = 1.0


def status_routes(state: ServerState) -> list[Route]:
    """Return the routes."""
    routes = StatusRoutes(state)
    return [
        Route(method="GET", path="/live", handler=routes.live, access=Access.PUBLIC),
        Route(method="GET", path="/health", handler=routes.health, access=Access.PUBLIC),
        Route(method="GET", path="/ready", handler=routes.ready, access=Access.PUBLIC),
        Route(method="GET", path="/version", handler=routes.version),
        Route(method="GET", path="/load", handler=routes.load),
        Route(method="GET", path="/v1/models", handler=routes.models),
        Route(method="GET", path="/v1/models/*", handler=routes.model),
    ]


class StatusRoutes:
    """Handles requests about the state of the server."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._created = int(time.time())

    async def live(self, exchange: Exchange) -> None:
        """Respond as long as the event loop runs."""
        await exchange.respond({"status": "alive"})

    async def health(self, exchange: Exchange) -> None:
        """Respond with 200 if the engine makes progress."""
        await self._respond(exchange, await self._state.slot.problem())

    async def ready(self, exchange: Exchange) -> None:
        """Respond with 200 if new requests are accepted and the engine makes progress."""
        slot = self._state.slot
        await self._respond(exchange, "draining" if slot.draining else await slot.problem())

    async def _respond(self, exchange: Exchange, problem: str) -> None:
        if not problem:
            await exchange.respond({"status": "ready"})
            return
        error = unavailable(
            f"The server is not ready: {problem}.", code=problem, retry_after_s=RETRY_AFTER_S
        )
        body = {"status": problem, **error.body(exchange.request_id)}
        await exchange.respond(body, status=error.status, headers=error.headers())

    async def version(self, exchange: Exchange) -> None:
        """Respond with the version."""
        await exchange.respond({"version": version("dovetail-core")})

    async def load(self, exchange: Exchange) -> None:
        """Respond with the numbers of running and waiting requests of all API processes."""
        state, slot = self._state, self._state.slot
        stats = slot.llm.last_stats if slot.is_loaded else None
        await exchange.respond(
            {
                "server_load": state.admission.num_running + await state.others.num_running(),
                "num_running": 0 if stats is None else stats.num_running,
                "num_waiting": 0 if stats is None else stats.num_waiting,
                "kv_cache_usage": 0.0 if stats is None else stats.kv_cache_usage,
            }
        )

    async def models(self, exchange: Exchange) -> None:
        """Respond with the list of models."""
        await exchange.respond({"object": "list", "data": [self._model()]})

    async def model(self, exchange: Exchange) -> None:
        """Respond with one model."""
        if exchange.rest != self._state.slot.served_model_name:
            raise APIError(
                f"The model {exchange.rest[:120]!r} does not exist.",
                status=404,
                code="model_not_found",
                param="model",
            )
        await exchange.respond(self._model())

    def _model(self) -> dict[str, Any]:
        slot = self._state.slot
        return {
            "id": slot.served_model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "dovetail",
            "root": slot.served_model_name,
            "parent": None,
            "max_model_len": slot.llm.max_model_len if slot.is_loaded else None,
        }
