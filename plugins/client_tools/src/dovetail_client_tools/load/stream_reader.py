"""Reads one streamed completion: server-sent events with limits, and the times of its tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from dovetail_client_tools.http_client.connection import CallError

MAX_LINE_BYTES = 1 << 20
MAX_ERROR_BYTES = 64 << 10
MAX_EVENTS_PER_TOKEN = 4
"""A stream with more events per requested token than this is treated as endless."""
_SPARE_EVENTS = 64
MAX_STORED_CHARS = 1 << 20

_DATA = b"data:"
_DONE = b"[DONE]"
OK = 200


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_DECODER = msgspec.json.Decoder(_Event)


class StreamReader:
    """Receives the response to a request with `stream`, and records when tokens arrive.

    now_ns: function that returns the time. max_tokens: limit of the request. on_gap: called with
    the time between two events with text, in nanoseconds. keeps_text: whether `text` is stored.

    first_ns, last_ns: when the first and the last text arrived; 0 for none. num_events: events with
    text. num_prompt_tokens, num_output_tokens: values of the `usage` field; 0 if it is missing.
    """

    def __init__(
        self,
        now_ns: Callable[[], int],
        max_tokens: int,
        on_gap: Callable[[int], None],
        *,
        keeps_text: bool = False,
    ) -> None:
        self._now_ns = now_ns
        self._on_gap = on_gap
        self._max_events = MAX_EVENTS_PER_TOKEN * max_tokens + _SPARE_EVENTS
        self._keeps_text = keeps_text
        self.first_ns = self.last_ns = 0
        self.num_events = self.num_prompt_tokens = self.num_output_tokens = 0
        self.is_complete = False
        self._num_lines = self._num_chars = 0
        self._status = OK
        self._buffer = bytearray()
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """The text of the completion, if it is stored."""
        return "".join(self._pieces)

    def start(self, status: int, headers: dict[str, str]) -> None:
        """Check the type of the response."""
        self._status = status
        kind = headers.get("content-type", "")
        if status == OK and not kind.lower().startswith("text/event-stream"):
            raise CallError(
                "wrong type", f"The response has the type {kind[:60]!r}, not text/event-stream."
            )

    def feed(self, data: bytes) -> None:
        """Read a part of the body."""
        if self._status != OK:
            self._buffer += data[: max(0, MAX_ERROR_BYTES - len(self._buffer))]
            return
        now_ns = self._now_ns()
        lines = data.split(b"\n")
        if self._buffer:
            lines[0] = bytes(self._buffer) + lines[0]
            self._buffer.clear()
        self._buffer += lines.pop()
        if len(self._buffer) > MAX_LINE_BYTES:
            raise CallError("malformed", f"An event has more than {MAX_LINE_BYTES:,} bytes.")
        for line in lines:
            if line.startswith(_DATA):
                self._read(line[len(_DATA) :].strip(), now_ns)
        self._num_lines += len(lines)
        if self._num_lines > 4 * self._max_events:
            raise self._endless()

    def finish(self) -> None:
        """Check that the response is complete. Raise CallError if it is not."""
        if self._status != OK:
            raise CallError(f"status {self._status}", error_text(bytes(self._buffer)))
        if not self.is_complete:
            message = "The stream ended without `data: [DONE]`."
            raise CallError("disconnected", message)

    def _read(self, content: bytes, now_ns: int) -> None:
        if content == _DONE:
            self.is_complete = True
            return
        try:
            event = _DECODER.decode(content)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise CallError("malformed", f"An event cannot be read: {error}.") from None
        if event.error is not None:
            raise CallError("error event", error_text(content))
        if event.usage is not None:
            self.num_prompt_tokens = event.usage.prompt_tokens
            self.num_output_tokens = event.usage.completion_tokens
        if self._read_choices(event.choices or ()):
            self._count(now_ns)

    def _read_choices(self, choices: Any) -> bool:
        has_text = False
        for choice in choices:
            delta = choice.delta
            text = choice.text if delta is None else delta.content
            has_text = has_text or bool(
                text or (delta and (delta.reasoning_content or delta.reasoning or delta.tool_calls))
            )
            if text and self._keeps_text and self._num_chars < MAX_STORED_CHARS:
                self._num_chars += len(text)
                self._pieces.append(text)
        return has_text

    def _count(self, now_ns: int) -> None:
        if self.num_events:
            self._on_gap(now_ns - self.last_ns)
        else:
            self.first_ns = now_ns
        self.last_ns = now_ns
        self.num_events += 1
        if self.num_events > self._max_events:
            raise self._endless()

    def _endless(self) -> CallError:
        return CallError("endless", "The stream has many more events than requested tokens.")


def error_text(content: bytes) -> str:
    """Return the message of an error response in one printable line of at most 300 characters."""
    try:
        body = msgspec.json.decode(content)
    except (msgspec.DecodeError, ValueError, RecursionError):
        body = content.decode("utf-8", "replace")
    error = body.get("error", body) if isinstance(body, dict) else body
    text = error.get("message", error) if isinstance(error, dict) else error
    line = " ".join(str(text).split())[:300]
    return "".join(item if item.isprintable() else "?" for item in line) or "no message"
