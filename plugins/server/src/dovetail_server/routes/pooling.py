"""The routes of pooling models: embeddings, classes, scores, and the order of documents."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import msgspec

from dovetail.engine.async_llm import AsyncLLM
from dovetail.engine.output.scoring import check_counts
from dovetail.errors import RequestError
from dovetail.outputs import PoolingRequestOutput
from dovetail.pooling_params import (
    CLASSIFY,
    EMBED,
    POOLING_TASKS,
    SCORE,
    TOKEN_EMBED,
    PoolingParams,
)
from dovetail_server.observers import RequestRecord
from dovetail_server.protocol.errors import APIError, api_error
from dovetail_server.protocol.fields import SharedFields, read_fields
from dovetail_server.protocol.pooling import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    class_items,
    document_texts,
    embedding_items,
    encode_body,
    rank_items,
    read_texts,
    score_items,
)
from dovetail_server.protocol.prompts import read_prompts
from dovetail_server.protocol.sampling import PARAMETER_NAMES
from dovetail_server.protocol.usage import Usage
from dovetail_server.routes.call_options import (
    check_model,
    check_task,
    note_ignored,
    prompt_traits,
    read_priority,
    read_timeout,
)
from dovetail_server.routes.completions import with_traits
from dovetail_server.routes.generation import all_of, raise_failure
from dovetail_server.routes.table import Route
from dovetail_server.state import ServerState
from dovetail_server.transport.exchange import Exchange

F = TypeVar("F", bound=SharedFields)

SCORING = (SCORE, EMBED, TOKEN_EMBED)
TASKS: Mapping[str, tuple[str, ...]] = {
    "/v1/embeddings": (EMBED,),
    "/v1/score": SCORING,
    "/score": SCORING,
    "/v1/rerank": SCORING,
    "/v2/rerank": SCORING,
    "/rerank": SCORING,
    "/classify": (CLASSIFY,),
    "/pooling": POOLING_TASKS,
}
"""The tasks, by route. The model needs one of them."""


def pooling_routes(state: ServerState) -> list[Route]:
    """Return the routes."""
    routes = PoolingRoutes(state)
    handlers = {
        "/v1/embeddings": routes.embed,
        "/classify": routes.classify,
        "/pooling": routes.pool,
        "/v1/score": routes.score,
        "/score": routes.score,
        "/v1/rerank": routes.rerank,
        "/v2/rerank": routes.rerank,
        "/rerank": routes.rerank,
    }
    return [Route(method="POST", path=path, handler=handlers[path]) for path in TASKS]


class PoolingRoutes:
    """Handles requests to pooling models."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def embed(self, exchange: Exchange) -> None:
        """Serve /v1/embeddings."""
        llm = self._state.slot.for_new_request()
        with self._state.admit(llm):
            request = await self._read(exchange, EmbeddingRequest)
            outputs = await self._encode(llm, exchange, request, _embedding_params(request, EMBED))
            encoding = request.encoding_format
            make = partial(embedding_items, outputs, "embedding", "embedding", encoding)
            await self._respond(exchange, outputs, make)

    async def pool(self, exchange: Exchange) -> None:
        """Serve /pooling."""
        llm = self._state.slot.for_new_request()
        with self._state.admit(llm):
            request = await self._read(exchange, PoolingRequest)
            params = _embedding_params(request, request.task or llm.supported_tasks[0])
            params = replace(params, use_activation=request.use_activation)
            outputs = await self._encode(llm, exchange, request, params)
            make = partial(embedding_items, outputs, "pooling", "data", request.encoding_format)
            await self._respond(exchange, outputs, make)

    async def classify(self, exchange: Exchange) -> None:
        """Serve /classify."""
        llm = self._state.slot.for_new_request()
        with self._state.admit(llm):
            request = await self._read(exchange, ClassifyRequest)
            outputs = await self._encode(llm, exchange, request, _class_params(request, CLASSIFY))
            labels = llm.config.model.hf_config.get("id2label")
            known = labels if isinstance(labels, Mapping) else {}
            await self._respond(exchange, outputs, partial(class_items, outputs, known))

    async def score(self, exchange: Exchange) -> None:
        """Serve /v1/score and /score."""
        llm = self._state.slot.for_new_request()
        with self._state.admit(llm):
            request = await self._read(exchange, ScoreRequest)
            firsts = read_texts("text_1", request.text_1)
            seconds = read_texts("text_2", request.text_2)
            check_counts(len(firsts), len(seconds), queries="text_1", documents="text_2")
            names = {"queries": "text_1", "documents": "text_2", "prompt": "text_2"}
            outputs = await self._score(llm, exchange, request, (firsts, seconds), names)
            await self._respond(exchange, outputs, partial(score_items, outputs))

    async def rerank(self, exchange: Exchange) -> None:
        """Serve /v1/rerank, /v2/rerank and /rerank."""
        llm = self._state.slot.for_new_request()
        with self._state.admit(llm):
            request = await self._read(exchange, RerankRequest)
            documents = document_texts(request.documents)
            if request.top_n is not None and request.top_n < 1:
                raise APIError(f"top_n={request.top_n} must be at least 1.", param="top_n")
            names = {"queries": "query", "prompt": "documents"}
            outputs = await self._score(llm, exchange, request, ([request.query], documents), names)
            make = partial(rank_items, outputs, documents, request)
            await self._respond(exchange, outputs, make, name="results")

    async def _read(self, exchange: Exchange, kind: type[F]) -> F:
        """Return the checked fields. Raise APIError for an invalid field or an unsuitable model."""
        fields = await exchange.read_object()
        name = fields.get("model")
        if name is not None and not isinstance(name, str):
            raise APIError("model must be a string.", code="invalid_type", param="model")
        check_model(name, self._state.slot.served_model_name)
        check_task(TASKS[exchange.path], exchange, self._state.slot)
        request, ignored = read_fields(fields, kind, strict=self._state.settings.strict_params)
        note_ignored(exchange, ignored)
        return request

    async def _encode(
        self,
        llm: AsyncLLM,
        exchange: Exchange,
        request: EmbeddingRequest | ClassifyRequest,
        params: PoolingParams,
    ) -> list[PoolingRequestOutput]:
        """Return the results of all inputs of a request."""
        prompts = read_prompts(request.input, "input")
        self._state.check_size(llm, len(prompts), "input")
        traits = prompt_traits(exchange, request, self._state.settings)
        options = self._options(exchange, request)
        response_id = exchange.response_id = f"pool-{uuid.uuid4().hex}"

        async def encode(index: int) -> PoolingRequestOutput:
            field = f"input[{index}]" if len(prompts) > 1 else "input"
            names = {**PARAMETER_NAMES, "prompt": field}
            prompt, request_id = with_traits(prompts[index], traits), f"{response_id}-{index}"
            try:
                output = await llm.encode(prompt, params, request_id, **options)
            except RequestError as error:
                raise api_error(error, names) from None
            raise_failure(output, names)
            return output

        with self._observed(exchange) as outputs:
            outputs += await all_of([encode(index) for index in range(len(prompts))])
        return outputs

    async def _score(
        self,
        llm: AsyncLLM,
        exchange: Exchange,
        request: ScoreRequest | RerankRequest,
        texts: tuple[list[str], list[str]],
        names: Mapping[str, str],
    ) -> list[PoolingRequestOutput]:
        """Return the scores of queries and documents. names: fields by parameter."""
        num_texts = len(texts[0]) + len(texts[1])
        self._state.check_size(llm, num_texts, names.get("documents", "documents"))
        traits: Any = prompt_traits(exchange, request, self._state.settings)
        options = self._options(exchange, request)
        names = {**PARAMETER_NAMES, **names}
        task = SCORE if SCORE in llm.supported_tasks else None
        params = _class_params(request, task)
        exchange.response_id = f"score-{uuid.uuid4().hex}"
        with self._observed(exchange) as outputs:
            try:
                outputs += await llm.score(*texts, params, traits=traits, **options)
            except RequestError as error:
                raise api_error(error, names) from None
            for output in outputs:
                raise_failure(output, names)
        return outputs

    def _options(self, exchange: Exchange, request: SharedFields) -> dict[str, Any]:
        return {
            "priority": read_priority(exchange, request),
            "timeout_s": read_timeout(exchange.headers, self._state.settings),
        }

    @contextmanager
    def _observed(self, exchange: Exchange) -> Iterator[list[PoolingRequestOutput]]:
        """Notify the observers when a request starts and ends.

        The body of the `with` statement must append the request's outputs to the yielded list.
        """
        state, outputs = self._state, list[PoolingRequestOutput]()
        arrival_ns, status, code = state.clock.now_ns(), "left", ""
        state.observers.started(exchange.request_id, exchange.path)
        try:
            yield outputs
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
                    outputs=tuple(outputs),
                    streamed=False,
                    num_completion_tokens=0,
                    traceparent=exchange.headers.get("traceparent", "")[:100],
                    arrival_ns=arrival_ns,
                    end_ns=state.clock.now_ns(),
                )
            )

    async def _respond(
        self,
        exchange: Exchange,
        outputs: Sequence[PoolingRequestOutput],
        make_items: Callable[[], list[msgspec.Raw]],
        name: str = "data",
    ) -> None:
        usage = Usage()
        for output in outputs:
            usage.add_prompt(output)
        fields = {
            "id": exchange.response_id,
            "object": "list",
            "created": int(time.time()),
            "model": self._state.slot.served_model_name,
            "usage": usage.body(),
        }
        await exchange.respond(await asyncio.to_thread(encode_body, make_items, name, fields))


def _embedding_params(request: EmbeddingRequest, task: str) -> PoolingParams:
    return PoolingParams(
        task=task,
        dimensions=request.dimensions,
        normalize=request.normalize,
        truncate_prompt_tokens=request.truncate_prompt_tokens,
    )


def _class_params(
    request: ClassifyRequest | ScoreRequest | RerankRequest, task: str | None
) -> PoolingParams:
    return PoolingParams(
        task=task,
        use_activation=request.use_activation,
        truncate_prompt_tokens=request.truncate_prompt_tokens,
    )
