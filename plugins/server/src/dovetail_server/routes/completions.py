"""The routes /v1/completions and /v1/chat/completions."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from dovetail.engine.async_llm import AsyncLLM
from dovetail.engine.messages.parsers import MAX_PROMPT_END_CHARS
from dovetail.inputs import Prompt
from dovetail_server.observers import RequestRecord
from dovetail_server.protocol.chat_prompts import chat_prompt, special_texts
from dovetail_server.protocol.errors import APIError, api_error
from dovetail_server.protocol.fields import (
    CHAT_RULES,
    ChatRequest,
    CompletionRequest,
    FieldRules,
    GenerationFields,
    read_fields,
)
from dovetail_server.protocol.logprobs import TokenTexts
from dovetail_server.protocol.messages import Reading, apply_reading, read_use
from dovetail_server.protocol.prompts import OnePrompt, read_prompts
from dovetail_server.protocol.response_forms import ChatForm, CompletionForm, ResponseForm
from dovetail_server.protocol.sampling import Sampling, chat_sampling, completion_sampling
from dovetail_server.routes.call_options import (
    check_format,
    check_model,
    check_task,
    note_ignored,
    prompt_traits,
    read_priority,
    read_timeout,
)
from dovetail_server.routes.generation import Call, Generation
from dovetail_server.routes.table import Route
from dovetail_server.state import ServerState
from dovetail_server.transport.exchange import Exchange

S = TypeVar("S", bound=msgspec.Struct)
FormMaker = Callable[..., ResponseForm]
"""Takes the arguments of `GenerationRoutes._form`."""


def completion_routes(state: ServerState) -> list[Route]:
    """Return the routes."""
    routes = GenerationRoutes(state)
    return [
        Route(method="POST", path="/v1/completions", handler=routes.complete),
        Route(method="POST", path="/v1/chat/completions", handler=routes.chat),
    ]


class GenerationRoutes:
    """Handles completions and chat completions."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def complete(self, exchange: Exchange) -> None:
        """Serve /v1/completions."""
        llm = self._state.slot.for_new_request()
        with self._state.admit(llm):
            request = await self.read(exchange, CompletionRequest)
            check_format(request, llm)
            sampling = completion_sampling(request, llm.default_sampling_params())
            prompts = read_prompts(request.prompt)
            if request.add_special_tokens is False:
                prompts = await asyncio.to_thread(_without_special_tokens, llm, prompts)
            form = self._form(CompletionForm, llm, request, num_top=request.logprobs)
            call = self._call(llm, exchange, request, prompts, sampling, form)
            await self._serve(llm, exchange, call, streamed=bool(request.stream))

    async def chat(self, exchange: Exchange) -> None:
        """Serve /v1/chat/completions."""
        llm = self._state.slot.for_new_request()
        with self._state.admit(llm):
            request = await self.read(exchange, ChatRequest)
            await self.serve_chat(llm, exchange, request, self._form)

    async def serve_chat(
        self,
        llm: AsyncLLM,
        exchange: Exchange,
        request: ChatRequest,
        make_form: FormMaker,
        announce: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Serve a chat whose fields have been read.

        make_form: creates the response format. announce: awaited before the generation starts.
        """
        check_format(request, llm)
        sampling = chat_sampling(request, llm.default_sampling_params())
        read_use(request)  # a wrong tool is rejected before the template runs
        tokens, text = await asyncio.to_thread(self._chat_prompt, llm, request)
        reading = _reading(llm, request, text)
        sampling = apply_reading(llm, request, sampling, reading)
        num_top = (request.top_logprobs or 0) if request.logprobs else None
        form = make_form(ChatForm, llm, request, num_top=num_top)
        call = self._call(llm, exchange, request, [tokens], sampling, form)
        if reading.parser() is not None:
            call = replace(call, reading=reading)
        if announce is not None:
            await announce()
        await self._serve(llm, exchange, call, streamed=bool(request.stream))

    def _chat_prompt(self, llm: AsyncLLM, request: ChatRequest) -> tuple[list[int], str]:
        allowed = self._state.settings.allow_request_templates
        if request.chat_template is not None and not allowed:
            raise APIError(
                "chat_template is not accepted by this server (--allow-request-templates).",
                code="unsupported_parameter",
                param="chat_template",
            )
        return chat_prompt(llm, request)

    async def read(self, exchange: Exchange, kind: type[S], rules: FieldRules = CHAT_RULES) -> S:
        """Return the checked fields of a request. Raise APIError for an invalid field."""
        fields = await exchange.read_object()
        strict = self._state.settings.strict_params
        request, ignored = read_fields(fields, kind, strict=strict, rules=rules)
        note_ignored(exchange, ignored)
        slot = self._state.slot
        check_model(getattr(request, "model", None), slot.served_model_name)
        check_task(("generate",), exchange, slot)
        return request

    def _form(
        self,
        kind: type[ResponseForm],
        llm: AsyncLLM,
        request: GenerationFields,
        *,
        num_top: int | None,
    ) -> ResponseForm:
        options = request.stream_options
        return kind(
            *form_arguments(
                kind,
                self._state,
                llm,
                as_ids=bool(request.return_tokens_as_token_ids),
                hides_special=request.skip_special_tokens is not False,
            ),
            num_top=num_top,
            with_usage=bool(request.stream and options is not None and options.include_usage),
        )

    def _call(
        self,
        llm: AsyncLLM,
        exchange: Exchange,
        request: GenerationFields,
        prompts: Sequence[OnePrompt],
        sampling: Sampling,
        form: ResponseForm,
    ) -> Call:
        traits = prompt_traits(exchange, request, self._state.settings)
        self._state.check_size(llm, len(prompts) * sampling.params.n, sampling.names.get("n", "n"))
        return Call(
            prompts=[with_traits(item, traits) for item in prompts],
            sampling=sampling,
            form=form,
            priority=read_priority(exchange, request),
            timeout_s=read_timeout(exchange.headers, self._state.settings),
            echo=isinstance(request, CompletionRequest) and bool(request.echo),
            with_ids=bool(request.return_token_ids),
        )

    async def _serve(
        self, llm: AsyncLLM, exchange: Exchange, call: Call, *, streamed: bool
    ) -> None:
        """Generate and respond. Notify the observers."""
        exchange.response_id = call.form.id
        generation, state = Generation(llm, exchange, call), self._state
        arrival_ns, status, code = state.clock.now_ns(), "left", ""
        state.observers.started(exchange.request_id, exchange.path)
        try:
            if streamed:
                await generation.stream()
            else:
                await exchange.respond(await generation.answer())
            status = "ok"
        except Exception as error:
            status, code = "error", api_error(error).code
            raise
        finally:
            state.observers.ended(
                RequestRecord(
                    request_id=exchange.request_id,
                    route=exchange.path,
                    status=status,
                    code=code,
                    outputs=tuple(call.outputs.values()),
                    streamed=streamed,
                    num_completion_tokens=call.usage.num_completion_tokens,
                    num_tokens=tuple(call.num_tokens.get(index, 0) for index in call.outputs),
                    finish_reasons=tuple(call.finish_reasons),
                    traceparent=exchange.headers.get("traceparent", "")[:100],
                    arrival_ns=arrival_ns,
                    end_ns=state.clock.now_ns(),
                )
            )


def form_arguments(
    kind: type[ResponseForm],
    state: ServerState,
    llm: AsyncLLM,
    *,
    as_ids: bool = False,
    hides_special: bool = True,
) -> tuple[str, int, str, TokenTexts]:
    """Return the arguments of a form: a new id, the time, the model, and the token strings."""
    texts = TokenTexts(llm.tokenizer, as_ids=as_ids, hides_special=hides_special)
    new_id = f"{kind.id_prefix}{kind.id_separator}{uuid.uuid4().hex}"
    return new_id, int(time.time()), state.slot.served_model_name, texts


def _reading(llm: AsyncLLM, request: ChatRequest, text: str) -> Reading:
    """Return how the text of the choices is read. text: the text of the prompt."""
    hides = request.skip_special_tokens is not False and llm.tokenizer is not None
    return Reading(
        parsers=llm.parsers,
        use=read_use(request),
        prompt_end=text[-MAX_PROMPT_END_CHARS:],
        hidden=special_texts(llm.tokenizer) if hides and llm.tokenizer is not None else None,
        with_reasoning=request.include_reasoning is not False,
    )


def with_traits(one_prompt: OnePrompt, traits: dict[str, Any]) -> Prompt:
    """Return a prompt for the engine with the entries of `prompt_traits`."""
    if not traits:
        return one_prompt
    key = "prompt" if isinstance(one_prompt, str) else "prompt_token_ids"
    prompt: Prompt = {key: one_prompt, **traits}  # type: ignore[assignment,misc]
    return prompt


def _without_special_tokens(llm: AsyncLLM, prompts: Sequence[OnePrompt]) -> list[OnePrompt]:
    """Return prompts as token ids, without the tokens that a tokenizer adds to a text."""
    tokenizer = llm.tokenizer
    if tokenizer is None:
        return list(prompts)
    return [
        tokenizer.encode(item, add_special_tokens=False) if isinstance(item, str) else item
        for item in prompts
    ]
