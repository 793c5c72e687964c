"""The route /props, which describes the model to clients of llama.cpp's server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from dovetail.interfaces import (
    HTTPRequest,
    HTTPResponse,
    HTTPRoute,
    HTTPRoutes,
    HTTPRoutesContext,
)

FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "max_tokens",
)
"""The sampling defaults that the route shows."""


class PropsRoutes(HTTPRoutes):
    """Provides GET /props."""

    def __init__(self, context: HTTPRoutesContext) -> None:
        self._context = context

    def routes(self) -> Sequence[HTTPRoute]:
        """Return the route."""
        return (HTTPRoute(method="GET", path="/props", handler=self._describe),)

    async def _describe(self, request: HTTPRequest) -> HTTPResponse:
        engine = self._context.engine
        defaults = asdict(engine.default_sampling_params())
        params = {name: defaults[name] for name in FIELDS}
        body = {
            "model_alias": self._context.served_model_name,
            "default_generation_settings": {"n_ctx": engine.max_model_len, "params": params},
            "modalities": {"vision": False, "audio": False},
        }
        return HTTPResponse(
            headers={"content-type": "application/json"}, body=json.dumps(body).encode()
        )

    def close(self) -> None:
        """Do nothing: the plugin holds no resources."""
