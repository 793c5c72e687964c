"""The response format of /v1/responses: the object, and the numbered events of a stream."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, ClassVar

import msgspec

from dovetail.outputs import RequestOutput
from dovetail_server.protocol.block_form import CALL, REASONING, TEXT, Block, BlockForm, sse
from dovetail_server.protocol.errors import APIError, public_text
from dovetail_server.protocol.logprobs import TokenTexts
from dovetail_server.protocol.responses.fields import ENCRYPTED, Reasoning, ResponsesRequest
from dovetail_server.protocol.responses.items import encrypt
from dovetail_server.protocol.usage import Usage

_encode = msgspec.json.encode

Save = Callable[[dict[str, Any]], Awaitable[None]]


class ResponsesForm(BlockForm):
    """The format of one response. save: stores its object when it changes; None without a store."""

    id_prefix = "resp"
    id_prefixes: ClassVar[Mapping[str, str]] = {REASONING: "rs", TEXT: "msg", CALL: "fc"}

    def __init__(
        self,
        response_id: str,
        created: int,
        model: str,
        texts: TokenTexts,
        *,
        num_top: int | None,
        request: ResponsesRequest,
        save: Save | None = None,
    ) -> None:
        super().__init__(response_id, created, model, texts, num_top=num_top)
        reasoning = request.reasoning or Reasoning()
        self._as_summary = reasoning.summary is not None
        self._encrypts = ENCRYPTED in (request.include or ())
        self._save = save
        self._numbers = iter(range(1 << 62))
        self._static = _static_fields(request)

    # --- the object ---------------------------------------------------------------------------

    def object(
        self, status: str, usage: dict[str, Any] | None = None, error: APIError | None = None
    ) -> dict[str, Any]:
        """Return the response with a status."""
        incomplete = status == "incomplete"
        code = "rate_limit_exceeded" if error and error.status == 429 else "server_error"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "model": self.model,
            "output": [self._item(block, status) for block in self.blocks],
            "incomplete_details": {"reason": "max_output_tokens"} if incomplete else None,
            "error": None if error is None else {"code": code, "message": public_text(str(error))},
            "usage": usage,
            **self._static,
        }

    def failed_object(self, error: APIError) -> dict[str, Any]:
        """Return the response after an error. An aborted response is cancelled."""
        if error.code == "aborted":
            return self.object("cancelled")
        return self.object("failed", error=error)

    async def complete(self, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        """Return the complete response, after it has been stored."""
        self.read_choice(choices[0])
        return await self._final(usage)

    async def _final(self, usage: Usage) -> dict[str, Any]:
        status = "incomplete" if self.finish_reason == "length" else "completed"
        body = self.object(status, await self._usage(usage))
        if self._save is not None:
            await self._save(body)
        return body

    async def _usage(self, usage: Usage) -> dict[str, Any]:
        return {
            "input_tokens": usage.num_prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.num_cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.num_completion_tokens,
            "output_tokens_details": {
                "reasoning_tokens": min(
                    await self.num_reasoning_tokens(), usage.num_completion_tokens
                )
            },
            "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
        }

    def _item(self, block: Block, status: str, text: str | None = None) -> dict[str, Any]:
        """Return the item of a block. text: "" for a block that starts."""
        text = block.text if text is None else text
        cut = status != "completed" and block is self.blocks[-1]
        own = {"id": block.id, "status": "incomplete" if cut else "completed"}
        if status == "in_progress":
            own["status"] = status
        if block.kind == CALL:
            return {
                "type": "function_call",
                **own,
                "call_id": block.call_id,
                "name": block.name,
                "arguments": text,
            }
        if block.kind == TEXT:
            content = [self._part(block, text)] if text else []
            return {"type": "message", "role": "assistant", **own, "content": content}
        part = [self._part(block, text)] if text else []
        item: dict[str, Any] = {
            "type": "reasoning",
            **own,
            "summary": part if self._as_summary else [],
            "content": [] if self._as_summary else part,
        }
        if self._encrypts and text:
            item["encrypted_content"] = encrypt(text)
        return item

    def _part(self, block: Block, text: str) -> dict[str, Any]:
        if block.kind == TEXT:
            logprobs = block.logprobs if text else []
            return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
        return {"type": "summary_text" if self._as_summary else "reasoning_text", "text": text}

    # --- events -------------------------------------------------------------------------------

    def start_events(self, output: RequestOutput) -> bytes:
        """Return the events with which a stream starts."""
        body = self.object("in_progress")
        return self._event("response.created", response=body) + self._event(
            "response.in_progress", response=body
        )

    def open_events(self, block: Block) -> bytes:
        """Return the events with which an item starts."""
        item = self._item(block, "in_progress", "")
        data = self._event("response.output_item.added", output_index=block.index, item=item)
        return data if block.kind == CALL else data + self._part_event("added", block, "")

    def extend_events(self, block: Block, piece: str, logprobs: list[Any]) -> bytes:
        """Return the event for the next piece of an item."""
        more = {"logprobs": logprobs} if block.kind == TEXT else {}
        return self._event(
            f"{self._text_name(block)}.delta", **self._at(block), delta=piece, **more
        )

    def close_events(self, block: Block) -> bytes:
        """Return the events with which an item ends."""
        name, text = f"{self._text_name(block)}.done", block.text
        if block.kind == CALL:
            data = self._event(name, **self._at(block), name=block.name, arguments=text)
        else:
            more = {"logprobs": block.logprobs} if block.kind == TEXT else {}
            data = self._event(name, **self._at(block), text=text, **more)
            data += self._part_event("done", block, text)
        item = self._item(block, "incomplete" if self.finish_reason == "length" else "completed")
        return data + self._event("response.output_item.done", output_index=block.index, item=item)

    async def finish(self, usage: Usage) -> bytes:
        """Return the last bytes of a stream, after the response has been stored."""
        data = self.close_last()
        body = await self._final(usage)
        return data + self._event(f"response.{body['status']}", response=body)

    def error_event(self, error: APIError) -> bytes:
        """Return the last event of a stream that fails."""
        return self._event("response.failed", response=self.failed_object(error))

    def _part_event(self, end: str, block: Block, text: str) -> bytes:
        kind = "reasoning_summary_part" if self._is_summary(block) else "content_part"
        return self._event(
            f"response.{kind}.{end}", **self._at(block), part=self._part(block, text)
        )

    def _at(self, block: Block) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": block.id, "output_index": block.index}
        if block.kind != CALL:
            place["summary_index" if self._is_summary(block) else "content_index"] = 0
        return place

    def _text_name(self, block: Block) -> str:
        if block.kind == CALL:
            return "response.function_call_arguments"
        if block.kind == TEXT:
            return "response.output_text"
        kind = "reasoning_summary_text" if self._as_summary else "reasoning_text"
        return f"response.{kind}"

    def _is_summary(self, block: Block) -> bool:
        return block.kind == REASONING and self._as_summary

    def _event(self, kind: str, **fields: Any) -> bytes:
        return sse(kind, {"sequence_number": next(self._numbers), **fields}, _encode)


class ResponsesErrors:
    """Formats errors. In a stream, the error event contains the failed response."""

    def __init__(self, form: ResponsesForm) -> None:
        self._form = form

    def body(self, error: APIError, request_id: str) -> dict[str, Any]:
        """Return the body of an error response."""
        return error.body(request_id)

    def event(self, error: APIError, request_id: str) -> bytes:
        """Return the last event of a stream that fails."""
        return self._form.error_event(error)


def _static_fields(request: ResponsesRequest) -> dict[str, Any]:
    """Return the fields of the response that are copied from the request."""
    return dict(_repeated(request))


def _repeated(request: ResponsesRequest) -> Iterator[tuple[str, Any]]:
    reasoning = request.reasoning or Reasoning()
    format_ = (request.text.format if request.text else None) or {"type": "text"}
    yield "background", False
    yield "instructions", request.instructions
    yield "max_output_tokens", request.max_output_tokens
    yield "metadata", request.metadata or {}
    yield "parallel_tool_calls", request.parallel_tool_calls is not False
    yield "previous_response_id", request.previous_response_id
    yield "reasoning", {"effort": reasoning.effort, "summary": reasoning.summary}
    yield "store", request.store is not False
    yield "temperature", request.temperature
    yield "text", {"format": format_, "verbosity": "medium"}
    yield "tool_choice", request.tool_choice if request.tool_choice is not None else "auto"
    yield "tools", [{"parameters": None, "strict": None, **tool} for tool in request.tools or ()]
    yield "top_logprobs", request.top_logprobs or 0
    yield "top_p", request.top_p
    yield "truncation", request.truncation or "disabled"
    yield "user", request.user
    yield "service_tier", "default"
