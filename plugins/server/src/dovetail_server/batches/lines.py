"""Reads and executes the lines of a batch file. An invalid line does not affect other lines."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import msgspec

from dovetail_server.batches.line_reader import MAX_LINE_BYTES, InputLine
from dovetail_server.protocol.errors import public_text
from dovetail_server.transport.body import num_values
from dovetail_server.transport.internal import InternalCalls, InternalResponse

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
"""The routes that a line may name."""

MAX_CUSTOM_ID_CHARS = 512
BUSY = (429, 503)
"""HTTP statuses after which the server may execute the line later."""
MAX_ATTEMPTS = 8
"""Maximum number of attempts for a line while the server is busy, or its engine restarts."""
MAX_WAIT_S = 10.0


class LineError(Exception):
    """A line that cannot be executed. code: a stable identifier.

    custom_id: the line's id, or "".
    """

    def __init__(self, message: str, *, code: str = "invalid_line", custom_id: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.custom_id = custom_id


@dataclass(frozen=True, kw_only=True)
class BatchLine:
    """A request of a batch. url: one of `ENDPOINTS`. body: the JSON object for the route."""

    custom_id: str
    url: str
    body: dict[str, Any]


def read_line(text: bytes, endpoints: Collection[str] = ENDPOINTS) -> BatchLine:
    """Return the request in a line of JSON. Raise LineError that names the invalid field.

    endpoints: the routes that this batch may call.
    """
    try:
        fields = msgspec.json.decode(text)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise LineError(f"The line is not valid JSON: {error}.", code="invalid_json") from None
    if type(fields) is not dict:
        raise LineError("The line must be a JSON object.")
    custom_id = fields.get("custom_id")
    if type(custom_id) is not str or not 0 < len(custom_id) <= MAX_CUSTOM_ID_CHARS:
        raise LineError(
            f"custom_id must be a string of 1 to {MAX_CUSTOM_ID_CHARS} characters.",
            code="invalid_custom_id",
        )
    if fields.get("method") != "POST":
        raise LineError('method must be "POST".', code="invalid_method", custom_id=custom_id)
    url, body = fields.get("url"), fields.get("body")
    if url not in endpoints:
        raise LineError(
            f"url must be {' or '.join(endpoints)} in this batch.",
            code="invalid_url",
            custom_id=custom_id,
        )
    if type(body) is not dict:
        raise LineError("body must be an object.", code="invalid_body", custom_id=custom_id)
    for name in ("stream", "background"):
        if body.get(name):
            raise LineError(
                f"body.{name} must not be true in a batch.",
                code="unsupported_parameter",
                custom_id=custom_id,
            )
    return BatchLine(custom_id=custom_id, url=url, body=body)


class LineExecutor:
    """Executes lines by calling the routes of a server in this process.

    The routes check and limit each request as they do for a client. custom_ids: the number of the
    first line with each custom_id.
    """

    def __init__(
        self,
        calls: InternalCalls,
        *,
        endpoints: Collection[str] = ENDPOINTS,
        max_line_bytes: int = MAX_LINE_BYTES,
        max_values: int | None = None,
        max_attempts: int | None = MAX_ATTEMPTS,
    ) -> None:
        """endpoints: the routes that the lines may call.

        max_values: maximum number of JSON values of a line, counted by `num_values`; None for no
        limit.
        max_attempts: maximum number of attempts while the server is busy; None for no limit.
        """
        self.custom_ids: dict[str, int] = {}
        self._calls = calls
        self._endpoints = endpoints
        self._max_line_bytes = max_line_bytes
        self._max_values = max_values
        self._max_attempts = max_attempts

    async def record(self, line: InputLine, *, record_id: str, caller: str = "") -> dict[str, Any]:
        """Execute a line of a file and return its record.

        The record of an invalid line has an error. See `execute` for the arguments.
        """
        try:
            request = self.read(line)
        except LineError as error:
            return error_record(record_id, error.custom_id, error.code, str(error))
        return await self.execute(request, record_id=record_id, caller=caller)

    def read(self, line: InputLine) -> BatchLine:
        """Return the request in a line. Raise LineError that names the invalid field."""
        if line.text is None:
            message = f"The line has more than {self._max_line_bytes:,} bytes."
            raise LineError(message, code="line_too_long")
        if self._max_values is not None and num_values(line.text) > self._max_values:
            message = f"The line has more than {self._max_values:,} values."
            raise LineError(message, code="line_too_long")
        request = read_line(line.text, self._endpoints)
        first = self.custom_ids.setdefault(request.custom_id, line.number)
        if first != line.number:
            message = f"Line {first} has the same custom_id."
            raise LineError(message, code="duplicate_custom_id", custom_id=request.custom_id)
        return request

    async def execute(self, line: BatchLine, *, record_id: str, caller: str = "") -> dict[str, Any]:
        """Return the record of a line: its response with the status, or an error.

        Repeats the request while the server is busy. record_id: the id of the record. caller: name
        of the API key for which the line is executed.
        """
        body = msgspec.json.encode(line.body)
        for attempt in itertools.count(1):
            response = await self._calls.post(line.url, body, caller=caller, request_id=record_id)
            if response.status not in BUSY or attempt == self._max_attempts:
                break
            if self._max_attempts is None and "retry-after" not in response.headers:
                break
            await asyncio.sleep(_wait_s(response))
        if not response.status:
            message = "The request was cancelled."
            return error_record(record_id, line.custom_id, "cancelled", message)
        return {
            "id": record_id,
            "custom_id": line.custom_id,
            "response": {
                "status_code": response.status,
                "request_id": response.headers.get("x-request-id", record_id),
                "body": msgspec.Raw(response.body),
            },
            "error": None,
        }


def is_success(record: dict[str, Any]) -> bool:
    """Return whether the record of a line has a response without an error."""
    response = record["response"]
    return response is not None and response["status_code"] == 200


def error_record(record_id: str, custom_id: str, code: str, message: str) -> dict[str, Any]:
    """Return the record of a line that was not executed."""
    error = {"code": code, "message": public_text(message)}
    return {"id": record_id, "custom_id": custom_id, "response": None, "error": error}


def _wait_s(response: InternalResponse) -> float:
    text = response.headers.get("retry-after", "")
    return min(float(text), MAX_WAIT_S) if text.isdecimal() else 1.0
