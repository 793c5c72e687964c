"""The two response formats: text completions and chat messages.

The parts that are equal for all events of a stream are encoded once. An event that contains only
text is then a concatenation of bytes.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from dovetail.outputs import RequestOutput
from dovetail_server.protocol.logprobs import ChatLogprobs, CompletionLogprobs, TokenTexts
from dovetail_server.protocol.usage import Usage

_encode = msgspec.json.encode

DONE = b"data: [DONE]\n\n"


class ResponseForm:
    """The response format of one API. id, created, model: fields of every response.

    has_batches: whether a request may have several prompts. texts: converts token ids to strings,
    for log-probabilities. num_top: log-probabilities at each position; None for none. with_usage:
    whether a stream ends with the token counts, and every event has the `usage` field.
    """

    id_prefix: ClassVar[str]
    id_separator: ClassVar[str] = "-"
    object_name: ClassVar[str]
    event_name: ClassVar[str]
    text_open: ClassVar[bytes]
    text_close: ClassVar[bytes]
    has_batches: ClassVar[bool]

    def __init__(
        self,
        response_id: str,
        created: int,
        model: str,
        texts: TokenTexts,
        *,
        num_top: int | None,
        with_usage: bool = False,
    ) -> None:
        self.id, self.created, self.model = response_id, created, model
        self.num_top = num_top
        self.with_usage = with_usage
        self.texts = texts
        head = _encode(
            {"id": response_id, "object": self.event_name, "created": created, "model": model}
        )
        self._head = b"data: " + head[:-1]
        self._end = b',"usage":null}\n\n' if with_usage else b"}\n\n"
        self._plain_end = (
            self.text_close
            + b',"logprobs":null,"finish_reason":null,"stop_reason":null}]'
            + self._end
        )
        self._starts: dict[int, bytes] = {}

    def event(self, index: int, text: str) -> bytes:
        """Return an event that has only text. index: the index of the choice."""
        start = self._starts.get(index)
        if start is None:
            start = self._starts[index] = self._choice_start(index) + self.text_open
        return start + _encode(text) + self._plain_end

    def full_event(self, index: int, text: str, fields: dict[str, Any]) -> bytes:
        """Return an event with text and additional fields of the choice."""
        choice = {"logprobs": None, "finish_reason": None, "stop_reason": None} | fields
        body = self.text_open + _encode(text) + self.text_close
        return self._choice_start(index) + body + b"," + _encode(choice)[1:] + b"]" + self._end

    def delta_event(self, index: int, delta: dict[str, Any], fields: dict[str, Any]) -> bytes:
        """Return an event with the new parts of a message and additional fields of the choice."""
        choice = {"logprobs": None, "finish_reason": None, "stop_reason": None} | fields
        body = b'"delta":' + _encode(delta) + b"," + _encode(choice)[1:]
        return self._choice_start(index) + body + b"]" + self._end

    def usage_event(self, usage: dict[str, Any]) -> bytes:
        """Return the event with the token counts."""
        return self._head + b',"choices":[],"usage":' + _encode(usage) + b"}\n\n"

    def first_event(self, index: int, output: RequestOutput) -> bytes:
        """Return the event with which a choice starts, if the format has such an event.

        output: the first output of the request.
        """
        return b""

    async def finish(self, usage: Usage) -> bytes:
        """Return the last bytes of a stream."""
        return (self.usage_event(usage.body()) if self.with_usage else b"") + DONE

    async def complete(self, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        """Return a complete response."""
        return self.body(choices, usage.body())

    def body(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        """Return a complete response."""
        return {
            "id": self.id,
            "object": self.object_name,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "usage": usage,
        }

    def choice(self, index: int, text: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Return a choice of a complete response."""
        raise NotImplementedError

    def logprobs(self, offset: int = 0) -> CompletionLogprobs | ChatLogprobs:
        """Return an empty block of log-probabilities. offset: characters before it."""
        raise NotImplementedError

    def _choice_start(self, index: int) -> bytes:
        return b'%b,"choices":[{"index":%d,' % (self._head, index)


class CompletionForm(ResponseForm):
    """The response format of /v1/completions."""

    id_prefix = "cmpl"
    object_name = "text_completion"
    event_name = "text_completion"
    text_open = b'"text":'
    text_close = b""
    has_batches = True

    def choice(self, index: int, text: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Return a choice of a complete response."""
        return {"index": index, "text": text, **fields}

    def logprobs(self, offset: int = 0) -> CompletionLogprobs:
        """Return an empty block of log-probabilities. offset: characters before it."""
        return CompletionLogprobs(self.texts, offset)


class ChatForm(ResponseForm):
    """The response format of /v1/chat/completions."""

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    event_name = "chat.completion.chunk"
    text_open = b'"delta":{"content":'
    text_close = b"}"
    has_batches = False
    role = "assistant"

    def first_event(self, index: int, output: RequestOutput) -> bytes:
        """Return the event with the role of the message."""
        delta = b'"delta":{"role":%b,"content":""' % _encode(self.role)
        return self._choice_start(index) + delta + self._plain_end

    def choice(self, index: int, text: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Return a choice of a complete response."""
        message = {"role": self.role, "content": text, "refusal": None}
        return {"index": index, "message": message, **fields}

    def logprobs(self, offset: int = 0) -> ChatLogprobs:
        """Return an empty block of log-probabilities."""
        return ChatLogprobs(self.texts, self.num_top or 0)
