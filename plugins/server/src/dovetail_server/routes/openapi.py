"""The OpenAPI document of the server, derived from the request classes and the table of routes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Any

import msgspec

from dovetail_server.protocol.anthropic.fields import CountRequest, MessagesRequest
from dovetail_server.protocol.errors import OPENAI_ERRORS
from dovetail_server.protocol.fields import ChatRequest, CompletionRequest
from dovetail_server.protocol.pooling import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from dovetail_server.protocol.responses.fields import ResponsesRequest
from dovetail_server.routes.batches import BatchRequest
from dovetail_server.routes.files import PURPOSES
from dovetail_server.routes.table import JSON, Access, Route, RouteTable
from dovetail_server.routes.tokens import Detokenize, TokenizeChat, TokenizeText
from dovetail_server.transport.exchange import Exchange

BODIES: Mapping[str, tuple[type, ...]] = {
    "/v1/batches": (BatchRequest,),
    "/v1/completions": (CompletionRequest,),
    "/v1/chat/completions": (ChatRequest,),
    "/v1/messages": (MessagesRequest,),
    "/v1/messages/count_tokens": (CountRequest,),
    "/v1/responses": (ResponsesRequest,),
    "/v1/embeddings": (EmbeddingRequest,),
    "/v1/score": (ScoreRequest,),
    "/score": (ScoreRequest,),
    "/v1/rerank": (RerankRequest,),
    "/v2/rerank": (RerankRequest,),
    "/rerank": (RerankRequest,),
    "/classify": (ClassifyRequest,),
    "/pooling": (PoolingRequest,),
    "/tokenize": (TokenizeText, TokenizeChat),
    "/detokenize": (Detokenize,),
}
"""The classes of the bodies, by path. Other routes take any JSON object."""

WITHOUT_BODY = frozenset({"/v1/responses/*/cancel", "/v1/batches/*/cancel"})
FORMS = {
    "/v1/files": {
        "type": "object",
        "required": ["file", "purpose"],
        "properties": {
            "file": {"type": "string", "format": "binary"},
            "purpose": {"enum": list(PURPOSES)},
        },
    }
}
"""The schemas of bodies in the form multipart/form-data."""

_REFERENCE = "#/components/schemas/{name}"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code", "request_id"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
                "request_id": {"type": "string"},
            },
        }
    },
}
_USAGE = {
    "type": "object",
    "required": ["prompt_tokens", "completion_tokens", "total_tokens"],
    "properties": {
        "prompt_tokens": {"type": "integer"},
        "completion_tokens": {"type": "integer"},
        "total_tokens": {"type": "integer"},
        "prompt_tokens_details": {"type": "object"},
    },
}
_ANSWER = {
    "type": "object",
    "required": ["id", "object", "created", "model", "choices", "usage"],
    "properties": {
        "id": {"type": "string"},
        "object": {"type": "string"},
        "created": {"type": "integer"},
        "model": {"type": "string"},
        "choices": {"type": "array", "items": {"type": "object"}},
        "usage": _USAGE,
    },
}


def openapi_route(table: RouteTable) -> Route:
    """Return the route of the OpenAPI document, made from `table` at the time of a request."""

    async def respond(exchange: Exchange) -> None:
        await exchange.respond(make_document(table.routes()))

    return Route(method="GET", path="/openapi.json", handler=respond)


def make_document(routes: Iterable[Route]) -> dict[str, Any]:
    """Return the OpenAPI document about `routes`."""
    classes = list(dict.fromkeys(kind for kinds in BODIES.values() for kind in kinds))
    _, schemas = msgspec.json.schema_components(classes, ref_template=_REFERENCE)
    paths: dict[str, Any] = {}
    for route in routes:
        path = route.path.replace("*", "{name}")
        paths.setdefault(path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Dovetail", "version": version("dovetail-core")},
        "paths": paths,
        "components": {
            "schemas": {**schemas, "Error": _ERROR, "Answer": _ANSWER},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route) -> dict[str, Any]:
    is_openai = route.errors is OPENAI_ERRORS
    error = {JSON: {"schema": _ref("Error") if is_openai else {"type": "object"}}}
    has_choices = route.path in ("/v1/completions", "/v1/chat/completions")
    generates = has_choices or route.path in ("/v1/responses", "/v1/messages")
    response = _ref("Answer") if has_choices else {"type": "object"}
    content: dict[str, Any] = {
        route.media_type: {"schema": response} if route.media_type == JSON else {}
    }
    if generates:
        content["text/event-stream"] = {}  # OpenAPI 3.1 has no schemas for events
    operation: dict[str, Any] = {
        "operationId": f"{route.method.lower()}{route.path.replace('/', '_').replace('*', 'name')}",
        "responses": {
            "200": {"description": "The response.", "content": content},
            "4XX": {"description": "The request is rejected.", "content": error},
            "503": {"description": "The server cannot serve the request now.", "content": error},
        },
        "security": [] if route.access is Access.PUBLIC else [{}, {"key": []}],
    }
    if "*" in route.path:
        operation["parameters"] = [
            {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    if route.method == "POST" and route.path not in WITHOUT_BODY:
        schemas = [_ref(item.__name__) for item in BODIES.get(route.path, ())]
        schema = {"anyOf": schemas} if len(schemas) > 1 else (schemas or [{"type": "object"}])[0]
        content = {JSON: {"schema": schema}}
        if (form := FORMS.get(route.path)) is not None:
            content = {"multipart/form-data": {"schema": form}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _ref(name: str) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(name=name)}
