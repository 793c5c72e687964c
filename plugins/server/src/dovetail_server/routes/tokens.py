"""The routes of the tokenizer: /tokenize, /detokenize and /tokenizer_info."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct

from dovetail.interfaces import Tokenizer
from dovetail_server.protocol.chat_prompts import chat_prompt
from dovetail_server.protocol.errors import APIError
from dovetail_server.protocol.fields import ChatRequest, read_fields
from dovetail_server.protocol.logprobs import TokenTexts
from dovetail_server.routes.call_options import check_model, note_ignored
from dovetail_server.routes.table import Route
from dovetail_server.state import ServerState
from dovetail_server.transport.exchange import Exchange

MAX_TOKEN_ID = 2**31 - 1
MAX_TEXT_CHARS = 1 << 20
"""Maximum characters of a text, as in a conversation. Longer texts delay other requests."""


class TokenizeText(Struct, kw_only=True):
    """The body of /tokenize for a text."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChat(Struct, kw_only=True):
    """The body of /tokenize for a conversation."""

    messages: list[dict[str, Any]]
    model: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    return_token_strs: bool | None = None


class Detokenize(Struct, kw_only=True):
    """The body of /detokenize."""

    tokens: list[Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]]
    model: str | None = None


def token_routes(state: ServerState) -> list[Route]:
    """Return the routes."""
    routes = TokenRoutes(state)
    return [
        Route(method="POST", path="/tokenize", handler=routes.tokenize),
        Route(method="POST", path="/detokenize", handler=routes.detokenize),
        Route(method="GET", path="/tokenizer_info", handler=routes.info),
    ]


class TokenRoutes:
    """Handles requests to the tokenizer."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def tokenize(self, exchange: Exchange) -> None:
        """Respond with the token ids of a text or a conversation."""
        with self._state.admit(self._state.slot.llm):
            await self._tokenize(exchange)

    async def _tokenize(self, exchange: Exchange) -> None:
        llm, fields = self._state.slot.llm, await exchange.read_object()
        tokenizer = self._tokenizer()
        kind = TokenizeChat if "messages" in fields else TokenizeText
        request, ignored = read_fields(fields, kind, strict=self._state.settings.strict_params)
        note_ignored(exchange, ignored)
        check_model(request.model, self._state.slot.served_model_name)
        if isinstance(request, TokenizeChat):
            chat = ChatRequest(
                messages=request.messages,
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
                chat_template_kwargs=request.chat_template_kwargs,
                tools=request.tools,
                reasoning_effort=request.reasoning_effort,
            )
            tokens, _ = await asyncio.to_thread(chat_prompt, llm, chat)
        else:
            if len(request.prompt) > MAX_TEXT_CHARS:
                raise APIError(
                    f"prompt has {len(request.prompt)} characters; at most {MAX_TEXT_CHARS} are "
                    "accepted.",
                    param="prompt",
                )
            adds = request.add_special_tokens is not False
            tokens = await asyncio.to_thread(_encode, tokenizer, request.prompt, adds)
        body = {"count": len(tokens), "max_model_len": llm.max_model_len, "tokens": tokens}
        if request.return_token_strs:
            body["token_strs"] = await asyncio.to_thread(_strings, tokenizer, tokens)
        await exchange.respond(body)

    async def detokenize(self, exchange: Exchange) -> None:
        """Respond with the text of token ids."""
        with self._state.admit(self._state.slot.llm):
            await self._detokenize(exchange)

    async def _detokenize(self, exchange: Exchange) -> None:
        fields = await exchange.read_object()
        tokenizer = self._tokenizer()
        strict = self._state.settings.strict_params
        request, ignored = read_fields(fields, Detokenize, strict=strict)
        note_ignored(exchange, ignored)
        check_model(request.model, self._state.slot.served_model_name)
        highest = max(request.tokens, default=0)
        if highest >= tokenizer.vocab_size:
            raise APIError(
                f"tokens contains {highest}; the tokenizer has ids from 0 to "
                f"{tokenizer.vocab_size - 1}.",
                param="tokens",
            )
        await exchange.respond(
            {"prompt": await asyncio.to_thread(tokenizer.decode, request.tokens)}
        )

    async def info(self, exchange: Exchange) -> None:
        """Respond with information about the tokenizer."""
        tokenizer, llm = self._tokenizer(), self._state.slot.llm
        await exchange.respond(
            {
                "tokenizer_class": type(tokenizer).__name__,
                "vocab_size": tokenizer.vocab_size,
                "model_max_length": llm.max_model_len,
                "eos_token_id": tokenizer.eos_token_id,
                **tokenizer.special_tokens,
                "special_token_ids": sorted(tokenizer.special_token_ids),
                "chat_template": tokenizer.chat_templates.get("default"),
            }
        )

    def _tokenizer(self) -> Tokenizer:
        tokenizer = self._state.slot.llm.tokenizer
        if tokenizer is None:
            raise APIError(
                "This server has no tokenizer (--skip-tokenizer-init).", code="no_tokenizer"
            )
        return tokenizer


def _encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def _strings(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    texts = TokenTexts(tokenizer)
    return [texts.text(token) for token in tokens]
