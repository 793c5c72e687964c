"""Checks the headers, model name, priority and output format of a generation request."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from dovetail.engine.async_llm import AsyncLLM
from dovetail_server.lifecycle.engine_slot import EngineSlot
from dovetail_server.protocol.errors import APIError
from dovetail_server.protocol.fields import GenerationFields, SharedFields
from dovetail_server.protocol.grammars import grammar_field
from dovetail_server.routes.table import route_name
from dovetail_server.settings import ServerSettings
from dovetail_server.transport.exchange import Exchange

TIMEOUT_HEADER = "X-Request-Timeout"
"""Header: time limit for the complete response, in seconds."""

FIRST_TOKEN_HEADER = "X-First-Token-Timeout"
"""Header: time limit for the first token, in seconds."""

MAX_SECONDS = 1e6

BACKGROUND_PRIORITY = 1 << 40
"""Priority of requests for which no client waits; policies serve lower values first."""


def check_model(model: str | None, served: str) -> None:
    """Raise APIError if `model` is not the name of the served model."""
    if model is not None and model != served:
        raise APIError(
            f"The model {model[:120]!r} does not exist; this server has {served[:200]!r}.",
            status=404,
            code="model_not_found",
            param="model",
        )


def check_task(tasks: Sequence[str], exchange: Exchange, slot: EngineSlot) -> None:
    """Raise APIError if the model supports none of the tasks of a route."""
    supported = slot.llm.supported_tasks
    if not set(tasks) & set(supported):
        raise APIError(
            f"The route {route_name(exchange.path)} needs a model for the task "
            f"{' or '.join(tasks)}; the model {slot.served_model_name!r} supports: "
            f"{', '.join(supported)}.",
            code="unsupported_task",
            param="model",
        )


def note_ignored(exchange: Exchange, names: Sequence[str]) -> None:
    """List the ignored fields of a request in a header of its response."""
    if names:
        shown = [quote(name[:64], safe="") for name in names[:32]]
        exchange.extra_headers.append((b"x-ignored-params", ", ".join(shown).encode("ascii")))


def check_format(request: GenerationFields, llm: AsyncLLM) -> None:
    """Raise APIError if the engine cannot restrict its output to the requested format."""
    field = grammar_field(request)
    if field and llm.config.extensions.grammar_backend is None:
        raise APIError(
            f"{field} needs a grammar plugin, but this server has none (--grammar-backend). "
            f"Omit {field}.",
            code="unsupported_parameter",
            param=field,
        )


def read_timeout(headers: Mapping[str, str], settings: ServerSettings) -> float | None:
    """Return the time limit of a request in seconds, or None for no limit."""
    timeout_s = _seconds(headers, TIMEOUT_HEADER)
    maximum = settings.request_timeout_s
    if timeout_s is None or maximum is None:
        return maximum if timeout_s is None else timeout_s
    return min(timeout_s, maximum)


def read_priority(exchange: Exchange, request: SharedFields) -> int:
    """Return the priority of a request. Background work comes after all other requests."""
    priority = request.priority or 0
    return max(priority, BACKGROUND_PRIORITY) if exchange.is_background else priority


def prompt_traits(
    exchange: Exchange, request: SharedFields, settings: ServerSettings
) -> dict[str, Any]:
    """Return the entries of an engine prompt that the scheduler and the prefix cache use.

    The tenant is the `user` field, or the name of the API key.
    """
    traits: dict[str, Any] = {}
    due = _seconds(exchange.headers, FIRST_TOKEN_HEADER)
    if due is not None:
        traits["deadline_s"] = due
    if tenant := request.user or exchange.caller:
        traits["tenant"] = tenant
    salts = {"none": "", "key": exchange.caller, "user": request.user or ""}
    own = salts[settings.cache_salt_by]
    if salt := f"{own}:{request.cache_salt or ''}" if own else request.cache_salt:
        traits["cache_salt"] = salt
    return traits


def _seconds(headers: Mapping[str, str], name: str) -> float | None:
    text = headers.get(name.lower())
    if text is None:
        return None
    try:
        seconds = float(text) if len(text) <= 40 else math.nan
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_SECONDS:
        raise APIError(
            f"The header {name} is {text[:40]!r}; it must be a positive number of seconds, at "
            f"most {MAX_SECONDS:.0f}.",
            param=name,
        )
    return seconds
