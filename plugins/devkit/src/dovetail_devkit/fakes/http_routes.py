"""Fake HTTP routes, and a fake engine for tests of routes."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any, ClassVar

from dovetail.errors import RequestError
from dovetail.interfaces.http_routes import (
    HTTPRequest,
    HTTPResponse,
    HTTPRoute,
    HTTPRoutes,
    HTTPRoutesContext,
)
from dovetail.outputs import CompletionOutput, RequestMetrics, RequestOutput
from dovetail.sampling_params import SamplingParams
from dovetail_devkit.fakes.tokenizer import ByteTokenizer


class FakeAsyncEngine:
    """The part of `AsyncLLM` that routes use. Every response is "ok"."""

    max_model_len = 64
    num_unfinished = 0
    last_stats = None
    supported_tasks = ("generate",)

    def __init__(self) -> None:
        self.tokenizer = ByteTokenizer()

    def default_sampling_params(self) -> SamplingParams:
        """Return the default parameters of a request."""
        return SamplingParams()

    async def generate(
        self, prompt: Any, params: SamplingParams | None = None, request_id: str = "", **more: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield one output."""
        yield RequestOutput(
            request_id=request_id,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=[1],
            outputs=[CompletionOutput(0, "ok", [1], finish_reason="stop")],
            finished=True,
            metrics=RequestMetrics(arrival_ns=0),
        )


class FakeHTTPRoutes(HTTPRoutes):
    """Provides a route that describes the model, and a route that streams the words of a text."""

    examples: ClassVar[tuple[HTTPRequest, ...]] = (
        HTTPRequest(method="POST", path="/fake/words", query={}, headers={}, body=b'"one two"'),
    )

    def __init__(self, context: HTTPRoutesContext) -> None:
        self._context = context

    def routes(self) -> Sequence[HTTPRoute]:
        """Return the routes."""
        return (
            HTTPRoute(method="GET", path="/fake/model", handler=self._describe),
            HTTPRoute(method="POST", path="/fake/words", handler=self._stream_words),
        )

    async def _describe(self, request: HTTPRequest) -> HTTPResponse:
        body = {"model": self._context.served_model_name}
        return HTTPResponse(
            headers={"content-type": "application/json"}, body=json.dumps(body).encode()
        )

    async def _stream_words(self, request: HTTPRequest) -> HTTPResponse:
        try:
            text = json.loads(request.body)
        except (ValueError, RecursionError):
            raise RequestError("The body is not JSON.", parameter="body") from None
        if not isinstance(text, str):
            raise RequestError("The body must be a string.", parameter="body")

        async def words() -> AsyncIterator[bytes]:
            for word in text.split():
                yield word.encode()

        return HTTPResponse(headers={"content-type": "text/plain"}, body=words())

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
