"""The routes of pooling models. No model of this version computes embeddings or scores."""

from __future__ import annotations

from dovetail_server.protocol.errors import APIError
from dovetail_server.routes.call_options import check_model
from dovetail_server.routes.table import Route, route_name
from dovetail_server.state import ServerState
from dovetail_server.transport.exchange import Exchange

TASKS = {
    "/v1/embeddings": "embed",
    "/v1/score": "score",
    "/score": "score",
    "/v1/rerank": "score",
    "/rerank": "score",
    "/classify": "classify",
    "/pooling": "embed",
}
"""The task that a model needs for a route."""


def pooling_routes(state: ServerState) -> list[Route]:
    """Return the routes, which reject every request and name the tasks of the model."""

    async def reject(exchange: Exchange) -> None:
        fields = await exchange.read_object()
        name = fields.get("model")
        if name is not None and not isinstance(name, str):
            raise APIError("model must be a string.", code="invalid_type", param="model")
        check_model(name, state.slot.served_model_name)
        tasks = ", ".join(state.slot.llm.supported_tasks)
        raise APIError(
            f"The route {route_name(exchange.path)} needs a model for the task "
            f"{TASKS[exchange.path]!r}; the model "
            f"{state.slot.served_model_name!r} supports: {tasks}.",
            code="unsupported_task",
            param="model",
        )

    return [Route(method="POST", path=path, handler=reject) for path in TASKS]
