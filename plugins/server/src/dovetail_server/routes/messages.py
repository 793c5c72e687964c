"""The routes of Anthropic's Messages API."""

from __future__ import annotations

import asyncio
from typing import Any

from msgspec import structs

from dovetail.engine.async_llm import AsyncLLM
from dovetail.errors import UserError
from dovetail_server.protocol.anthropic.conversation import messages_of
from dovetail_server.protocol.anthropic.fields import (
    NAMES,
    RULES,
    VERSION_HEADER,
    CountRequest,
    MessagesRequest,
    chat_request,
    check_version,
    returns_thinking,
)
from dovetail_server.protocol.anthropic.form import ERRORS, MessagesForm
from dovetail_server.protocol.chat_prompts import chat_prompt
from dovetail_server.protocol.errors import APIError, api_error, rename_fields
from dovetail_server.protocol.fields import ChatRequest
from dovetail_server.protocol.response_forms import ResponseForm
from dovetail_server.routes.call_options import note_ignored
from dovetail_server.routes.completions import GenerationRoutes, form_arguments
from dovetail_server.routes.table import Route
from dovetail_server.state import ServerState
from dovetail_server.transport.exchange import Exchange

PATH = "/v1/messages"
BETA_HEADER = "anthropic-beta"


def messages_routes(state: ServerState) -> list[Route]:
    """Return the routes."""
    routes = MessagesRoutes(state)
    return [
        Route(method="POST", path=PATH, handler=routes.create, errors=ERRORS),
        Route(method="POST", path=f"{PATH}/count_tokens", handler=routes.count, errors=ERRORS),
    ]


class MessagesRoutes:
    """Handles messages. Each one is served as a chat."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._chats = GenerationRoutes(state)

    async def create(self, exchange: Exchange) -> None:
        """Create a message."""
        llm = self._state.slot.for_new_request()
        _read_headers(exchange)
        with self._state.admit(llm):
            request = await self._chats.read(exchange, MessagesRequest, RULES)
            try:
                chat = _chat(llm, request)
                await self._chats.serve_chat(llm, exchange, chat, self._form)
            except (APIError, UserError) as error:
                raise rename_fields(api_error(error), NAMES) from error

    async def count(self, exchange: Exchange) -> None:
        """Respond with the number of tokens of a prompt."""
        llm = self._state.slot.llm
        _read_headers(exchange)
        with self._state.admit(llm):
            request = await self._chats.read(exchange, CountRequest, RULES)
            try:
                tokens, _ = await asyncio.to_thread(chat_prompt, llm, _chat(llm, request))
            except (APIError, UserError) as error:
                raise rename_fields(api_error(error), NAMES) from error
            await exchange.respond({"input_tokens": len(tokens)})

    def _form(
        self, kind: type[ResponseForm], llm: AsyncLLM, chat: ChatRequest, *, num_top: int | None
    ) -> MessagesForm:
        return MessagesForm(*form_arguments(MessagesForm, self._state, llm), num_top=num_top)


def _chat(llm: AsyncLLM, request: CountRequest) -> ChatRequest:
    templates = llm.tokenizer.chat_templates.values() if llm.tokenizer is not None else ()
    messages: list[dict[str, Any]] = messages_of(request.system, request.messages)
    chat = chat_request(request, messages, "\n".join(templates))
    return structs.replace(chat, include_reasoning=returns_thinking(request))


def _read_headers(exchange: Exchange) -> None:
    check_version(exchange.headers.get(VERSION_HEADER))
    if BETA_HEADER in exchange.headers:
        note_ignored(exchange, [BETA_HEADER])
