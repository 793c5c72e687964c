"""Errors in the format of the OpenAI API.

A message never contains a path of this machine, a memory address or a traceback. URL paths such as
`/v1/completions` are kept.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from dovetail.errors import (
    CapacityError,
    EngineDeadError,
    RequestError,
    StalledError,
    UnavailableError,
    UserError,
)

MAX_MESSAGE_CHARS = 1000

_PRIVATE = re.compile(r"0x[0-9a-fA-F]{6,}|(?<![\w/.])/(?!v[12]/)(?:[\w.@+-]+/)+[\w.@+-]*")

_TUPLE = re.compile(r"(?<=\w)=\((.*?),?\)(?= )")
"""A tuple in an error message, for example "=(1, 2)". JSON writes it in brackets."""

_TEXTS = ("prompt", "queries", "documents")
"""The parameters of the engine that contain a text or token ids."""

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class APIError(Exception):
    """An error response. status: the HTTP status. param: the invalid field, or None.

    code: a stable identifier for programs. retry_after_s: delay before a retry; None for no retry.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "invalid_value",
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self, request_id: str) -> dict[str, Any]:
        """Return the body of the response."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": public_text(str(self)),
                "type": _TYPES.get(self.status, kind),
                "param": self.param,
                "code": self.code,
                "request_id": request_id,
            }
        }

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers of the response."""
        if self.retry_after_s is None:
            return [(b"x-should-retry", b"false")] if self.status == 408 else []
        return [(b"retry-after", str(max(1, round(self.retry_after_s))).encode())]


class ErrorForm(Protocol):
    """The format of an API's errors."""

    def body(self, error: APIError, request_id: str) -> dict[str, Any]:
        """Return the body of an error response."""

    def event(self, error: APIError, request_id: str) -> bytes:
        """Return the last event of a stream that fails."""


class OpenAIErrors:
    """OpenAI's error format, which all routes use unless the route table names another one."""

    def body(self, error: APIError, request_id: str) -> dict[str, Any]:
        """Return the body of an error response."""
        return error.body(request_id)

    def event(self, error: APIError, request_id: str) -> bytes:
        """Return the last event of a stream that fails."""
        return b"data: " + msgspec.json.encode(error.body(request_id)) + b"\n\n"


OPENAI_ERRORS: ErrorForm = OpenAIErrors()


def rename_fields(error: APIError, names: Mapping[str, str]) -> APIError:
    """Return an error with the field names of another API.

    names: maps the fields of a chat completion to those of the other API. The position in a list is
    left out, because the lists of the two APIs differ. A field of an entry stays in the message:
    "input: role is …".
    """
    param = error.param or ""
    field = re.split(r"[.\[]", param, maxsplit=1)[0]
    if field not in names:
        return error
    name, entry = names[field], re.fullmatch(r"\w+\[\d+\]\.(\w+)", param)
    shown = {param: f"{name}: {entry[1]}"} if entry else {}
    texts = "|".join(re.escape(text) for text in (param, field))
    return APIError(
        re.sub(rf"(?<!\w)(?:{texts})(?!\w)", lambda match: shown.get(match[0], name), str(error)),
        status=error.status,
        code=error.code,
        param=name,
        retry_after_s=error.retry_after_s,
    )


def public_text(message: str) -> str:
    """Return a message without paths and addresses, at most `MAX_MESSAGE_CHARS` long."""
    text = _PRIVATE.sub("…", message)
    return text if len(text) <= MAX_MESSAGE_CHARS else f"{text[: MAX_MESSAGE_CHARS - 1]}…"


def api_error(error: Exception, names: Mapping[str, str] | None = None) -> APIError:
    """Return the response for an exception. names: fields of the request, by parameter."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, RequestError):
        return _rejection(error, names or {})
    if isinstance(error, CapacityError):
        return APIError(str(error), status=429, code="queue_full", retry_after_s=1.0)
    if isinstance(error, UnavailableError):
        return unavailable(str(error), retry_after_s=error.retry_after_s)
    if isinstance(error, EngineDeadError):
        return unavailable("The engine has failed. Try again later.", code="engine_failed")
    if isinstance(error, StalledError):
        return unavailable("The engine does not respond. Try again later.")
    if isinstance(error, UserError):
        return APIError(str(error))
    return APIError(
        "The server failed unexpectedly; the server's log contains the reason.",
        status=500,
        code="internal_error",
    )


def unavailable(
    message: str, *, code: str = "engine_unavailable", retry_after_s: float = 1.0
) -> APIError:
    """Return an error with the status 503, for a server that cannot serve requests now."""
    return APIError(message, status=503, code=code, retry_after_s=retry_after_s)


def _rejection(error: RequestError, names: Mapping[str, str]) -> APIError:
    whole, bracket, index = error.parameter.partition("[")  # such as "documents[1]"
    param, message = names.get(whole, whole) + bracket + index, str(error)
    if param != error.parameter and message.startswith(error.parameter):
        message = param + message.removeprefix(error.parameter)
    message = _TUPLE.sub(r"=[\1]", message).replace(" must be None or ", " must be null or ")
    message = message.replace("=None must be ", "=null must be ")
    code = "invalid_value"
    too_long = "max_model_len" in message or "(max_prompt_chars)" in message
    if whole in _TEXTS and too_long:
        code = "context_length_exceeded"
    return APIError(message, code=code, param=param or None)
