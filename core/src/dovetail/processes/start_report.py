"""Reports of a child process to its parent about its start, over the control socket.

Each report is one packet: a JSON list of four strings. The content of a "ready" report may be long,
so it is sent in shared memory, and the packet carries its descriptor. The child's side uses only
the standard library.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass
from typing import Literal

from dovetail.errors import MessageError
from dovetail.transport.packets import receive_packet, send_packet
from dovetail.transport.ring_memory import memory_of, read_memory

MAX_READY_BYTES = 64 << 20
_MAX_PACKET_BYTES = 1 << 20
_MAX_TEXT_CHARS = 1 << 14  # at most six bytes each, so that a packet fits into the socket's buffer
_KINDS = ("phase", "ready", "failed")


@dataclass(frozen=True, slots=True)
class StartReport:
    """One report.

    "phase": `name` begins. "ready": `content` is the result of the startup. "failed": the child
    exits; `name`, `text` and `detail` are those of a `RemoteError`.
    """

    kind: Literal["phase", "ready", "failed"]
    name: str = ""
    text: str = ""
    detail: str = ""
    content: bytes = b""


def send_report(control: socket.socket, report: StartReport) -> None:
    """Send a report to the parent. Do nothing if the parent has closed its end."""
    texts = (report.name, report.text, report.detail)
    packet = json.dumps([report.kind, *(text[:_MAX_TEXT_CHARS] for text in texts)]).encode()
    memory = [memory_of(report.content)] if report.content else []
    try:
        send_packet(control, packet, memory)
    except (BrokenPipeError, ConnectionResetError):
        return
    finally:
        for descriptor in memory:
            os.close(descriptor)


def receive_report(control: socket.socket) -> StartReport | None:
    """Return the next report, or None if no report has arrived or the child has closed its end.

    Does not wait. Raises MessageError for anything that is not a report.
    """
    try:
        packet, descriptors = receive_packet(control, _MAX_PACKET_BYTES, 2)
    except (BlockingIOError, ConnectionResetError):
        return None
    try:
        return _parse(packet, descriptors) if packet else None
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _parse(packet: bytes, descriptors: list[int]) -> StartReport:
    try:
        parts = json.loads(packet)
    except (ValueError, RecursionError) as error:
        raise MessageError(
            f"A packet of {len(packet)} bytes is not a start report: {error}"
        ) from None
    if not isinstance(parts, list) or [type(part) for part in parts] != [str] * 4:
        raise MessageError(
            f"A packet of {len(packet)} bytes is not a start report: it must be a JSON list of "
            "four strings."
        )
    kind, name, text, detail = parts
    if kind not in _KINDS or len(descriptors) > (kind == "ready"):
        raise MessageError(
            f"A start report of kind {kind!r:.80} with {len(descriptors)} descriptors is invalid."
        )
    return StartReport(kind, name, text, detail, _content(descriptors))


def _content(descriptors: list[int]) -> bytes:
    """Return the content of the shared memory of a report."""
    if not descriptors:
        return b""
    size = os.fstat(descriptors[0]).st_size
    if size > MAX_READY_BYTES:
        raise MessageError(f"A start report has {size} bytes; the limit is {MAX_READY_BYTES}.")
    content = read_memory(descriptors[0], size)
    if len(content) != size:
        raise MessageError(
            f"A start report has {size} bytes, of which only {len(content)} can be read."
        )
    return content
