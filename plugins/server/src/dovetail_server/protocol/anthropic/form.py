"""The response format of /v1/messages: message, content blocks, and the events of a stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from dovetail.outputs import RequestOutput
from dovetail_server.protocol.block_form import CALL, REASONING, TEXT, Block, BlockForm, sse
from dovetail_server.protocol.errors import APIError
from dovetail_server.protocol.usage import Usage

_encode = msgspec.json.encode

STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}


class MessagesForm(BlockForm):
    """The response format of one message."""

    id_prefix = "msg"
    id_prefixes: ClassVar[Mapping[str, str]] = {REASONING: "thinking", TEXT: "text", CALL: "toolu"}

    def _message(self, usage: dict[str, Any], *, is_complete: bool) -> dict[str, Any]:
        content = [_content(block, block.text) for block in self.blocks] if is_complete else []
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            **(
                self._stop_fields() if is_complete else {"stop_reason": None, "stop_sequence": None}
            ),
            "usage": usage,
        }

    def _stop_fields(self) -> dict[str, Any]:
        if self.finish_reason == "stop" and isinstance(self.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": self.stop_reason}
        reason = STOP_REASONS.get(self.finish_reason or "stop", "end_turn")
        return {"stop_reason": reason, "stop_sequence": None}

    async def complete(self, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        """Return the complete message."""
        self.read_choice(choices[0])
        return self._message(await self._usage(usage), is_complete=True)

    async def _usage(self, usage: Usage) -> dict[str, Any]:
        count = min(await self.num_reasoning_tokens(), usage.num_completion_tokens)
        return {
            **_prompt_usage(usage.num_prompt_tokens, usage.num_cached_tokens),
            "output_tokens": usage.num_completion_tokens,
            "output_tokens_details": {"thinking_tokens": count},
        }

    # --- events -------------------------------------------------------------------------------

    def start_events(self, output: RequestOutput) -> bytes:
        """Return the events with which a stream starts."""
        usage = _prompt_usage(len(output.prompt_token_ids), output.num_cached_tokens)
        message = self._message({**usage, "output_tokens": 0}, is_complete=False)
        return _event("message_start", message=message) + _event("ping")

    def open_events(self, block: Block) -> bytes:
        """Return the event with which a content block starts."""
        start = {**_content(block, ""), "input": {}} if block.kind == CALL else _content(block, "")
        return _event("content_block_start", index=block.index, content_block=start)

    def extend_events(self, block: Block, piece: str, logprobs: list[Any]) -> bytes:
        """Return the event for the next piece of a content block."""
        kind, key = {
            TEXT: ("text_delta", "text"),
            REASONING: ("thinking_delta", "thinking"),
            CALL: ("input_json_delta", "partial_json"),
        }[block.kind]
        delta = {"type": kind, key: piece}
        return _event("content_block_delta", index=block.index, delta=delta)

    def close_events(self, block: Block) -> bytes:
        """Return the events with which a content block ends."""
        data = b""
        if block.kind == REASONING:
            delta = {"type": "signature_delta", "signature": ""}
            data = _event("content_block_delta", index=block.index, delta=delta)
        return data + _event("content_block_stop", index=block.index)

    async def finish(self, usage: Usage) -> bytes:
        """Return the last bytes of a stream."""
        data = self.close_last()
        data += _event("message_delta", delta=self._stop_fields(), usage=await self._usage(usage))
        return data + _event("message_stop")


class AnthropicErrors:
    """Formats errors of this API, with the additional fields `param` and `code` of this server."""

    def body(self, error: APIError, request_id: str) -> dict[str, Any]:
        """Return the body of an error response."""
        own = error.body(request_id)["error"]
        kind = {413: "request_too_large", 503: "overloaded_error", 504: "timeout_error"}.get(
            error.status, "api_error" if error.status >= 500 else own["type"]
        )
        details = {"type": kind, "message": own["message"], "param": own["param"]}
        return {
            "type": "error",
            "error": {**details, "code": own["code"]},
            "request_id": request_id,
        }

    def event(self, error: APIError, request_id: str) -> bytes:
        """Return the last event of a stream that fails."""
        return b"event: error\ndata: " + _encode(self.body(error, request_id)) + b"\n\n"


ERRORS = AnthropicErrors()


def _prompt_usage(num_prompt_tokens: int, num_cached_tokens: int) -> dict[str, Any]:
    """Return the counts of the prompt; `input_tokens` excludes the cached tokens."""
    return {
        "input_tokens": num_prompt_tokens - num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached_tokens,
    }


def _content(block: Block, text: str) -> dict[str, Any]:
    if block.kind == TEXT:
        return {"type": "text", "text": text}
    if block.kind == REASONING:
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": _input(text)}


def _input(arguments: str) -> dict[str, Any]:
    """Return the arguments of a tool call, or {} if `max_tokens` has truncated them."""
    try:
        value = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _event(kind: str, **fields: Any) -> bytes:
    return sse(kind, fields, _encode)
