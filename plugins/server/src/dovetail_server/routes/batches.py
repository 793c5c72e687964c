"""The routes of OpenAI's Batches API."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from dovetail_server.batches.batch import COMPLETION_WINDOW, new_batch
from dovetail_server.batches.lines import ENDPOINTS
from dovetail_server.batches.runner import BatchRunner
from dovetail_server.protocol.errors import APIError
from dovetail_server.protocol.fields import FieldRules, read_fields
from dovetail_server.protocol.responses.fields import check_metadata
from dovetail_server.routes.call_options import note_ignored
from dovetail_server.routes.files import check_lifetime
from dovetail_server.routes.pages import page_of, read_query
from dovetail_server.routes.table import Route
from dovetail_server.state import ServerState
from dovetail_server.storage.batches import BatchStore
from dovetail_server.storage.files import FileStore
from dovetail_server.transport.exchange import Exchange

PATH = "/v1/batches"
RULES = FieldRules(unsupported={}, without_effect=())


class OutputLifetime(Struct, kw_only=True):
    """How long the output files of a batch are kept."""

    anchor: str
    seconds: int


class BatchRequest(Struct, kw_only=True):
    """The body of /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: OutputLifetime | None = None


def batch_routes(
    state: ServerState, batches: BatchStore, files: FileStore, runner: BatchRunner
) -> list[Route]:
    """Return the routes."""
    routes = BatchRoutes(state, batches, files, runner)
    return [
        Route(method="POST", path=PATH, handler=routes.create),
        Route(method="GET", path=PATH, handler=routes.list),
        Route(method="GET", path=f"{PATH}/*", handler=routes.retrieve),
        Route(method="POST", path=f"{PATH}/*/cancel", handler=routes.cancel),
    ]


class BatchRoutes:
    """Handles batches."""

    def __init__(
        self, state: ServerState, batches: BatchStore, files: FileStore, runner: BatchRunner
    ) -> None:
        self._state = state
        self._batches = batches
        self._files = files
        self._runner = runner

    async def create(self, exchange: Exchange) -> None:
        """Create a batch."""
        state = self._state
        state.slot.for_new_request()
        fields: dict[str, Any] = await exchange.read_object()
        request, ignored = read_fields(
            fields, BatchRequest, strict=state.settings.strict_params, rules=RULES
        )
        note_ignored(exchange, ignored)
        _check(request)
        file = await self._files.get(exchange.caller, request.input_file_id, "input_file_id")
        if file.purpose != "batch":
            raise APIError(
                f'The file has the purpose {file.purpose!r}; upload it with "batch".',
                param="input_file_id",
            )
        batch = new_batch(
            owner=exchange.caller,
            endpoint=request.endpoint,
            input_file_id=file.id,
            model=state.slot.served_model_name,
            timeout_s=state.settings.batch_timeout_s,
        )
        batch.metadata = request.metadata
        if request.output_expires_after is not None:
            batch.output_lifetime_s = request.output_expires_after.seconds
        await self._batches.add(batch)
        self._runner.wake()
        await exchange.respond(batch.object())

    async def list(self, exchange: Exchange) -> None:
        """Respond with a page of the batches of the key, the newest first."""
        query = read_query(exchange, ("after", "limit"))
        batches = await self._batches.list(exchange.caller)
        await exchange.respond(page_of([item.object() for item in batches], query))

    async def retrieve(self, exchange: Exchange) -> None:
        """Respond with a batch."""
        batch = await self._batches.get(exchange.caller, exchange.rest)
        await exchange.respond(batch.object())

    async def cancel(self, exchange: Exchange) -> None:
        """Request the cancellation of a batch, and respond with the batch."""
        await exchange.read_body()
        batch = await self._batches.cancel(exchange.caller, exchange.rest)
        self._runner.wake()
        await exchange.respond(batch.object())


def _check(request: BatchRequest) -> None:
    """Raise APIError for a field that the type does not check."""
    if request.endpoint not in ENDPOINTS:
        raise APIError(f"endpoint must be one of: {', '.join(ENDPOINTS)}.", param="endpoint")
    if request.completion_window != COMPLETION_WINDOW:
        raise APIError(
            f'completion_window must be "{COMPLETION_WINDOW}".', param="completion_window"
        )
    check_metadata(request.metadata)
    if request.output_expires_after is not None:
        if request.output_expires_after.anchor != "created_at":
            param = "output_expires_after.anchor"
            raise APIError(f"{param} must be created_at.", param=param)
        check_lifetime(request.output_expires_after.seconds, "output_expires_after.seconds")
