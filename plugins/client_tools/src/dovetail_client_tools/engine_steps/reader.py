"""Reads the steps of a server. Each error has a kind, which says what a later attempt can do."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

import msgspec

from dovetail.cli.client.connection import Server, rejection
from dovetail.errors import RequestError
from dovetail_client_tools.engine_steps.records import Steps
from dovetail_client_tools.http_client.client import HTTPClient, Response
from dovetail_client_tools.http_client.connection import CallError

MAX_RESPONSE_BYTES = 8 << 20
MAX_READ_STEPS = 1024
"""Maximum number of steps that a server returns at a time."""
TIMEOUT_S = 10.0
MAX_NAME_CHARS = 80
OK, NOT_FOUND, TOO_MANY, UNAVAILABLE = 200, 404, 429, 503


class Problem(StrEnum):
    """Describes why the steps cannot be read."""

    UNREACHABLE = "unreachable"
    BUSY = "busy"
    """The server is loading its model, is shutting down, or has too many readers."""
    REJECTED = "rejected"
    FOREIGN = "foreign"
    """The server is not Dovetail's, or is too old."""


class StepsError(RequestError):
    """The steps cannot be read."""

    def __init__(self, message: str, kind: Problem) -> None:
        super().__init__(message)
        self.kind = kind


class _Error(msgspec.Struct):
    code: str | None = None


class _Body(msgspec.Struct):
    error: _Error | None = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


_STEPS = msgspec.json.Decoder(Steps)
_MODELS = msgspec.json.Decoder(_Models)
_BODY = msgspec.json.Decoder(_Body)


class ServerNames(NamedTuple):
    """The address and the model of a server: short printable strings; "" if unknown."""

    url: str
    model: str


class StepsReader:
    """Reads the steps of one server."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._client = HTTPClient(server)

    @property
    def url(self) -> str:
        """The address of the server."""
        return self._server.url

    async def read(self, after: int, max_steps: int = MAX_READ_STEPS) -> Steps:
        """Return the steps with numbers above `after`. Raise StepsError if that fails."""
        path = f"/steps?after={after}&max_steps={max_steps}"
        response = await self._get(path)
        try:
            return _STEPS.decode(response.content)
        except (msgspec.DecodeError, ValueError, RecursionError):
            raise self._foreign("the content of /steps is not a step trace") from None

    async def names(self) -> ServerNames:
        """Return the address of the server and its model. Raise StepsError if that fails."""
        response = await self._get("/v1/models")
        try:
            models = _MODELS.decode(response.content).data
        except (msgspec.DecodeError, ValueError, RecursionError):
            raise self._foreign("/v1/models does not list models") from None
        return ServerNames(self._server.url, one_line(models[0].id) if models else "")

    async def _get(self, path: str) -> Response:
        try:
            response = await self._client.get(
                path, timeout_s=TIMEOUT_S, max_bytes=MAX_RESPONSE_BYTES
            )
        except CallError as error:
            if error.kind == "malformed":
                raise self._foreign("its response is not valid HTTP, or is too large") from None
            advice = "\nCheck --url, or start a server: dovetail serve --model NAME"
            raise StepsError(f"{error}{advice}", Problem.UNREACHABLE) from None
        if response.status == OK:
            return response
        if response.status == NOT_FOUND:
            raise self._missing(response, path.partition("?")[0])
        error = rejection(self._server, response.status, bytes(response.content[:65536]))
        is_busy = response.status in (TOO_MANY, UNAVAILABLE)
        raise StepsError(f"{error}", Problem.BUSY if is_busy else Problem.REJECTED)

    def _missing(self, response: Response, path: str) -> StepsError:
        try:
            error = _BODY.decode(response.content).error
        except (msgspec.DecodeError, ValueError, RecursionError):
            error = None
        if error is None or error.code != "unknown_route":
            return self._foreign(f"it has no route {path}")
        return StepsError(
            f"The server {self._server.url} has no route {path}. Update the server, or remove a "
            "proxy rule that hides the route.",
            Problem.FOREIGN,
        )

    def _foreign(self, reason: str) -> StepsError:
        text = f"{self._server.url} is not a Dovetail server: {reason}. Check --url."
        return StepsError(text, Problem.FOREIGN)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


def one_line(text: str, max_chars: int = MAX_NAME_CHARS) -> str:
    """Return a string from a server as one short line without control characters."""
    shown = "".join(item if item.isprintable() else "?" for item in text[:max_chars])
    return f"{shown}…" if len(text) > max_chars else shown
