"""The routes of the Responses API."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from dovetail.engine.async_llm import AsyncLLM
from dovetail.errors import UserError
from dovetail_server.protocol.chat_prompts import fit_messages
from dovetail_server.protocol.errors import APIError, api_error, rename_fields
from dovetail_server.protocol.fields import ChatRequest
from dovetail_server.protocol.response_forms import ResponseForm
from dovetail_server.protocol.responses.fields import (
    NAMES,
    RULES,
    ResponsesRequest,
    chat_request,
    check_fields,
)
from dovetail_server.protocol.responses.form import ResponsesErrors, ResponsesForm
from dovetail_server.protocol.responses.items import REFERENCE, messages_of, read_items
from dovetail_server.routes.completions import GenerationRoutes, form_arguments
from dovetail_server.routes.pages import page_of, read_query
from dovetail_server.routes.table import Route
from dovetail_server.state import ServerState
from dovetail_server.storage.responses import ResponseStore, not_found
from dovetail_server.transport.exchange import Exchange

PATH = "/v1/responses"
QUERY = {"stream": ("false",), "include_obfuscation": ("false",), "starting_after": ()}
"""Fields of a query that are not supported, and their values without effect."""


def responses_routes(state: ServerState, store: ResponseStore) -> list[Route]:
    """Return the routes."""
    routes = ResponsesRoutes(state, store)
    return [
        Route(method="POST", path=PATH, handler=routes.create),
        Route(method="GET", path=f"{PATH}/*", handler=routes.retrieve),
        Route(method="DELETE", path=f"{PATH}/*", handler=routes.delete),
        Route(method="POST", path=f"{PATH}/*/cancel", handler=routes.cancel),
        Route(method="GET", path=f"{PATH}/*/input_items", handler=routes.list_items),
    ]


class ResponsesRoutes:
    """Handles responses. Each one is served as a chat."""

    def __init__(self, state: ServerState, store: ResponseStore) -> None:
        self._state = state
        self._store = store
        self._chats = GenerationRoutes(state)

    async def create(self, exchange: Exchange) -> None:
        """Create a response."""
        llm = self._state.slot.for_new_request()
        with self._state.admit(llm):
            request = await self._chats.read(exchange, ResponsesRequest, RULES)
            check_fields(request)
            items = await self._conversation(exchange.caller, request)
            try:
                await self._serve(llm, exchange, request, items)
            except (APIError, UserError) as error:
                raise rename_fields(api_error(error), NAMES) from error

    async def _serve(
        self,
        llm: AsyncLLM,
        exchange: Exchange,
        request: ResponsesRequest,
        items: Sequence[dict[str, Any]],
    ) -> None:
        messages = await asyncio.to_thread(messages_of, items)
        if request.instructions:
            messages.insert(0, {"role": "system", "content": request.instructions})
        chat = chat_request(request, messages)
        if request.truncation == "auto":
            chat = await asyncio.to_thread(fit_messages, llm, chat)
        saved = _Saved(self._store, exchange.caller, items) if request.store is not False else None
        forms: list[ResponsesForm] = []

        def make_form(
            kind: type[ResponseForm], llm: AsyncLLM, chat: ChatRequest, *, num_top: int | None
        ) -> ResponsesForm:
            form = ResponsesForm(
                *form_arguments(ResponsesForm, self._state, llm),
                num_top=num_top,
                request=request,
                save=None if saved is None else saved.put,
            )
            exchange.errors = ResponsesErrors(form)
            forms.append(form)
            return form

        async def announce() -> None:
            if saved is not None:
                await saved.put(forms[0].object("in_progress"))

        try:
            await self._chats.serve_chat(llm, exchange, chat, make_form, announce)
        except BaseException as error:
            if saved is not None and saved.has_row:
                end = saved.end if exchange.started else saved.remove
                await asyncio.shield(end(forms[0], exchange.failure or error))
            raise

    async def _conversation(self, owner: str, request: ResponsesRequest) -> list[dict[str, Any]]:
        """Return the items of the previous response and of this request."""
        items = await asyncio.to_thread(read_items, request.input)
        if ids := [item["id"] for item in items if item.get("type") == REFERENCE]:
            stored = await self._store.items(owner, ids)
            items = [
                item if item.get("type") != REFERENCE else stored[item["id"]] for item in items
            ]
        previous = request.previous_response_id
        if previous is None:
            return items
        try:
            body, before = await self._store.conversation(owner, previous)
        except APIError as error:
            if error.code != "response_not_found":
                raise
            raise not_found(previous, "previous_response_id") from None
        if body["status"] not in ("completed", "incomplete"):
            raise APIError(
                f"The previous response has the status {body['status']}; it cannot be continued.",
                param="previous_response_id",
            )
        return [*before, *body["output"], *items]

    async def retrieve(self, exchange: Exchange) -> None:
        """Respond with a stored response."""
        for name, value in read_query(exchange, (*QUERY, "include")).items():
            if name in QUERY and value not in QUERY[name]:
                raise APIError(
                    f"{name} is not supported by this server; omit it.",
                    code="unsupported_parameter",
                    param=name,
                )
        body = await self._store.get(exchange.caller, exchange.rest)
        await exchange.respond(body)

    async def delete(self, exchange: Exchange) -> None:
        """Delete a stored response. Abort it if it is still being generated."""
        body = await self._store.get(exchange.caller, exchange.rest)
        await self._store.delete(exchange.caller, exchange.rest)
        if body["status"] == "in_progress":
            await self._abort(exchange.rest)
        await exchange.respond({"id": exchange.rest, "object": "response", "deleted": True})

    async def cancel(self, exchange: Exchange) -> None:
        """Cancel a response that is being generated, and respond with it."""
        await exchange.read_body()
        body = await self._store.get(exchange.caller, exchange.rest)
        if body["status"] == "in_progress":
            await self._abort(exchange.rest)
            body = await self._ended(exchange.caller, exchange.rest)
        await exchange.respond(body)

    async def list_items(self, exchange: Exchange) -> None:
        """Respond with a page of the input items of a response."""
        query = read_query(exchange, ("after", "include", "limit", "order"))
        _, items = await self._store.conversation(exchange.caller, exchange.rest)
        if query.get("order", "desc") == "desc":
            items.reverse()
        await exchange.respond(page_of([_listed(item) for item in items], query))

    async def _abort(self, response_id: str) -> None:
        if not self._state.abort([response_id], False):
            await self._state.others.abort([response_id], False)

    async def _ended(self, owner: str, response_id: str) -> dict[str, Any]:
        """Wait until a response is no longer being generated, and return it."""
        for _ in range(100):
            body = await self._store.get(owner, response_id)
            if body["status"] != "in_progress":
                break
            await asyncio.sleep(0.05)
        return body


class _Saved:
    """The database row of a response that is being generated."""

    def __init__(self, store: ResponseStore, owner: str, items: Sequence[dict[str, Any]]) -> None:
        self.has_row = False
        self._store = store
        self._owner = owner
        self._items = items
        self._encoded: bytes | None = None
        self._is_final = False

    async def put(self, body: dict[str, Any]) -> None:
        """Store the response."""
        if self._encoded is None:
            self._encoded = await self._store.encode_items(self._items)
        self.has_row = True
        await self._store.put(self._owner, body, self._encoded)
        self._is_final = body["status"] != "in_progress"

    async def remove(self, form: ResponsesForm, error: BaseException) -> None:
        """Delete a response whose id is unknown to its client."""
        with suppress(APIError):
            await self._store.delete(self._owner, form.id)

    async def end(self, form: ResponsesForm, error: BaseException) -> None:
        """Store the error of a response, or its cancellation if the client has disconnected."""
        if self._is_final:
            return
        is_error = isinstance(error, Exception)
        body = form.failed_object(api_error(error)) if is_error else form.object("cancelled")
        await self.put(body)


def _listed(item: dict[str, Any]) -> dict[str, Any]:
    """Return an input item as `list_items` shows it: content as parts, with a status."""
    if item["type"] == "message" and isinstance(item.get("content"), str):
        kind = "output_text" if item["role"] == "assistant" else "input_text"
        item = {**item, "content": [{"type": kind, "text": item["content"]}]}
    return {"status": "completed", **item}
