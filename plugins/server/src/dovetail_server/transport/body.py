"""Reads the body of a request, with limits that apply before its bytes are in memory."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from dovetail_server.protocol.errors import APIError
from dovetail_server.settings import ServerSettings

Receive = Callable[[], Awaitable[Mapping[str, Any]]]

_JSON = re.compile(r"application/(?:[\w.+-]+\+)?json\s*(?:;.*)?", re.IGNORECASE)

_WEIGHTS = ((b",", 1), (b":", 4), (b"[", 4), (b"{", 4))
"""Characters that begin or separate values, with the relative time to decode such a value."""


class ClientLeftError(Exception):
    """Raised if the client has closed the connection."""


class BodyReader:
    """Reads the bodies of all requests of a server."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._num_bytes = 0

    async def read(self, headers: Mapping[str, str], receive: Receive) -> bytes:
        """Return the body. Raise APIError if it is too large, ClientLeftError if it is incomplete.

        The bytes of all requests that are being received are limited, too.
        """
        stated = headers.get("content-length", "")
        if stated.isdecimal() and int(stated) > self._settings.max_body_bytes:
            raise self._too_large()
        pieces: list[bytes] = []
        size = 0
        try:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientLeftError
                piece = message.get("body", b"")
                size += len(piece)
                self._num_bytes += len(piece)
                self._check(size)
                pieces.append(piece)
                if not message.get("more_body", False):
                    return b"".join(pieces)
        finally:
            self._num_bytes -= size

    def _check(self, size: int) -> None:
        if size > self._settings.max_body_bytes:
            raise self._too_large()
        settings = self._settings
        if self._num_bytes > settings.max_total_body_bytes // settings.api_processes:
            raise APIError(
                "The server is receiving too many large requests. Try again later.",
                status=503,
                code="too_many_bodies",
                retry_after_s=1.0,
            )

    def _too_large(self) -> APIError:
        return APIError(
            f"The body is larger than {self._settings.max_body_bytes} bytes "
            "(--max-body-bytes). Send a smaller request.",
            status=413,
            code="body_too_large",
        )


def num_values(text: bytes) -> int:
    """Return an upper bound of the number of values in JSON. A name, list or object counts as 4."""
    return sum(weight * text.count(sign) for sign, weight in _WEIGHTS)


def read_json_object(
    headers: Mapping[str, str], body: bytes, settings: ServerSettings
) -> dict[str, Any]:
    """Return the JSON object in `body`. Raise APIError if it is something else."""
    kind = headers.get("content-type", "")
    if not _JSON.fullmatch(kind.strip()):
        raise APIError(
            f"The media type {kind[:80]!r} is not supported; send application/json.",
            status=415,
            code="unsupported_media_type",
        )
    if encoding := headers.get("content-encoding", ""):
        raise APIError(
            f"The content encoding {encoding[:80]!r} is not supported; send the body unencoded.",
            status=415,
            code="unsupported_encoding",
        )
    if num_values(body) > settings.max_json_values:
        raise APIError(
            f"The body may have more than {settings.max_json_values} values, where a name, list or "
            "object counts as four (--max-json-values). Send a smaller request.",
            status=413,
            code="body_too_large",
        )
    if not body:
        raise APIError("The body is empty; send a JSON object.", code="invalid_json")
    try:
        value = msgspec.json.decode(body)
    except UnicodeDecodeError:
        raise APIError("The body is not valid UTF-8.", code="invalid_json") from None
    except RecursionError:
        raise APIError("The body is nested too deeply.", code="invalid_json") from None
    except (msgspec.DecodeError, ValueError) as error:
        raise APIError(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    if type(value) is not dict:
        raise APIError("The body must be a JSON object.", code="invalid_json")
    return value
