"""The base class of responses that consist of blocks: reasoning, texts and tool calls, in order.

A subclass defines the events of its API. The blocks of a stream and of a complete response are
collected in the same way, so both have the same contents.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from dovetail.outputs import RequestOutput
from dovetail_server.protocol.logprobs import ChatLogprobs
from dovetail_server.protocol.response_forms import ResponseForm

REASONING, TEXT, CALL = "reasoning", "text", "call"


@dataclass(kw_only=True)
class Block:
    """A part of a message. kind: `REASONING`, `TEXT` or `CALL`. index: position in the message.

    id: a new random id. call_id, name: id and name of a tool call. pieces: the text, or the
    arguments of the call. logprobs: log-probabilities of a text.
    """

    kind: str
    index: int
    id: str
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.pieces)


class BlockForm(ResponseForm):
    """A format whose responses consist of blocks.

    blocks: the blocks so far. finish_reason, stop_reason: reasons of the message, once it has
    ended.
    """

    object_name = event_name = ""
    text_open = text_close = b""
    has_batches = False
    id_separator = "_"
    id_prefixes: ClassVar[Mapping[str, str]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.blocks: list[Block] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._is_open = False
        self._held: list[Any] = []  # log-probabilities of tokens whose text is not complete yet

    # --- what an API defines ------------------------------------------------------------------

    def start_events(self, output: RequestOutput) -> bytes:
        """Return the events with which a stream starts."""
        raise NotImplementedError

    def open_events(self, block: Block) -> bytes:
        """Return the events with which a block starts."""
        raise NotImplementedError

    def extend_events(self, block: Block, piece: str, logprobs: list[Any]) -> bytes:
        """Return the events for the next piece of a block."""
        raise NotImplementedError

    def close_events(self, block: Block) -> bytes:
        """Return the events with which a block ends."""
        raise NotImplementedError

    # --- streams ------------------------------------------------------------------------------

    def first_event(self, index: int, output: RequestOutput) -> bytes:
        """Return the events with which the stream starts."""
        return self.start_events(output)

    def event(self, index: int, text: str) -> bytes:
        """Return the events for new text."""
        return self._add(TEXT, text, [])

    def full_event(self, index: int, text: str, fields: dict[str, Any]) -> bytes:
        """Return the events for new text and the end of the message."""
        return self.delta_event(index, {"content": text}, fields)

    def delta_event(self, index: int, delta: dict[str, Any], fields: dict[str, Any]) -> bytes:
        """Return the events for the new parts of a message."""
        self._note_end(fields)
        logprobs = self._held + (fields.get("logprobs") or {}).get("content", [])
        self._held = [] if delta.get("content") else logprobs
        data = self._add(REASONING, delta.get("reasoning", ""), [])
        data += self._add(TEXT, delta.get("content", ""), logprobs)
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            if "id" in call:
                data += self._open(CALL, call_id=call["id"], name=function["name"])
            data += self._add(CALL, function["arguments"], [])
        return data

    def close_last(self) -> bytes:
        """Return the events with which the last block ends."""
        is_open, self._is_open = self._is_open, False
        return self.close_events(self.blocks[-1]) if is_open else b""

    def _open(self, kind: str, *, call_id: str = "", name: str = "") -> bytes:
        data = self.close_last()
        self._append(kind, call_id=call_id, name=name)
        self._is_open = True
        return data + self.open_events(self.blocks[-1])

    def _add(self, kind: str, piece: str, logprobs: list[Any]) -> bytes:
        if not piece:
            return b""
        data = b""
        if not self._is_open or self.blocks[-1].kind != kind:
            data = self._open(kind)
        block = self.blocks[-1]
        block.pieces.append(piece)
        block.logprobs += logprobs
        return data + self.extend_events(block, piece, logprobs)

    # --- complete responses -------------------------------------------------------------------

    def choice(self, index: int, text: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Return a choice that has only text."""
        return {"message": {"content": text}, **fields}

    def read_choice(self, choice: Mapping[str, Any]) -> None:
        """Collect the blocks of a complete message."""
        self._note_end(choice)
        message = choice["message"]
        for kind, name in ((REASONING, "reasoning"), (TEXT, "content")):
            if text := message.get(name):
                self._append(kind).pieces.append(text)
        if self.blocks and self.blocks[-1].kind == TEXT:
            self.blocks[-1].logprobs += (choice.get("logprobs") or {}).get("content", [])
        for call in message.get("tool_calls") or ():
            function = call["function"]
            block = self._append(CALL, call_id=call["id"], name=function["name"])
            block.pieces.append(function["arguments"])

    def logprobs(self, offset: int = 0) -> ChatLogprobs:
        """Return an empty block of log-probabilities."""
        return ChatLogprobs(self.texts, self.num_top or 0)

    async def num_reasoning_tokens(self) -> int:
        """Return the number of tokens in the reasoning text."""
        text = "".join(block.text for block in self.blocks if block.kind == REASONING)
        return await asyncio.to_thread(self.texts.count, text) if text else 0

    def _append(self, kind: str, *, call_id: str = "", name: str = "") -> Block:
        new_id = f"{self.id_prefixes[kind]}_{uuid.uuid4().hex}"
        block = Block(kind=kind, index=len(self.blocks), id=new_id, call_id=call_id, name=name)
        self.blocks.append(block)
        return block

    def _note_end(self, fields: Mapping[str, Any]) -> None:
        self.finish_reason = fields.get("finish_reason") or self.finish_reason
        self.stop_reason = fields.get("stop_reason") or self.stop_reason


def sse(kind: str, fields: Mapping[str, Any], encode: Any) -> bytes:
    """Return a server-sent event with a name. fields: its JSON object without `type`."""
    data: bytes = encode({"type": kind, **fields})
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)
