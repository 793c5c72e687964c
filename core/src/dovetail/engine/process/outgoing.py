"""Outputs to a front end: split into messages, and limited if the front end does not read.

A step's outputs may exceed the size of one message (log-probabilities of a long prompt); they are
then split into several. The front end acknowledges the messages that it has taken; while too many
messages or bytes are unacknowledged, the engine runs no step. It still processes incoming messages,
so that aborts, calls and shutdown are never delayed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from dovetail.engine.output.output_chunks import cut_outputs, work_of
from dovetail.errors import MessageError
from dovetail.interfaces import EngineCoreOutputs
from dovetail.transport.messages import Answer, Outputs, pack

MAX_UNREAD_MESSAGES = 64
"""Maximum number of unacknowledged messages with outputs; a front end may read them all at once."""

MAX_UNREAD_BYTES = 64 << 20
MAX_KEPT_BYTES = 2 * MAX_UNREAD_BYTES
"""Maximum unread bytes to keep for one front end while other front ends are served."""

FLOOD = 16
"""Multiple of `MAX_KEPT_BYTES` at which a front end that does not read responses is detached."""

ACKNOWLEDGE_EVERY = 16
"""Number of messages after which the front end sends an acknowledgment."""

MESSAGE_WORK = 1 << 16
"""Maximum tokens (16 bytes each) or positions with log-probabilities (128 bytes) per message."""


class OutputWindow:
    """Counts the messages that the front end has not taken yet."""

    def __init__(self) -> None:
        self._sizes: deque[int] = deque()
        self._num_bytes = 0

    @property
    def is_full(self) -> bool:
        """Whether no step may run until the front end has taken some messages."""
        # The front end does not acknowledge fewer than `ACKNOWLEDGE_EVERY` messages.
        too_large = self._num_bytes >= MAX_UNREAD_BYTES and len(self._sizes) >= ACKNOWLEDGE_EVERY
        return too_large or len(self._sizes) >= MAX_UNREAD_MESSAGES

    @property
    def is_overflowing(self) -> bool:
        """Whether the unread messages exceed `MAX_KEPT_BYTES`."""
        return self._num_bytes > MAX_KEPT_BYTES

    @property
    def is_flooded(self) -> bool:
        """Whether a front end without requests does not read the responses to its calls."""
        return self._num_bytes > FLOOD * MAX_KEPT_BYTES

    def sent(self, num_bytes: int) -> None:
        """Count a message with outputs that was sent."""
        self._sizes.append(num_bytes)
        self._num_bytes += num_bytes

    def taken(self, num_messages: int) -> None:
        """Subtract messages that the front end has taken, at most the number sent."""
        for _ in range(min(num_messages, len(self._sizes))):
            self._num_bytes -= self._sizes.popleft()


def pack_outputs(outputs: EngineCoreOutputs, replies: tuple[Answer, ...] = ()) -> Iterator[bytes]:
    """Encode a step's outputs as messages, each within the limit.

    replies: results of calls, sent with the first message. The statistics are in the last message.
    """
    if work_of(outputs) <= MESSAGE_WORK:
        whole = _try_pack(outputs, replies)
        if whole is not None:
            yield whole
            return
    yield pack(Outputs.of(EngineCoreOutputs(), replies))
    yield from _pack_pieces(replace(outputs, stats=None), MESSAGE_WORK)
    yield pack(Outputs.of(EngineCoreOutputs(stats=outputs.stats)))


def _pack_pieces(outputs: EngineCoreOutputs, maximum: int) -> Iterator[bytes]:
    for piece in cut_outputs(outputs, maximum):
        content = _try_pack(piece)
        if content is not None:
            yield content
        elif maximum > 1:  # a few entries with long ids or reasons are too large
            yield from _pack_pieces(piece, maximum // 8)
        else:
            yield pack(Outputs.of(piece))


def _try_pack(outputs: EngineCoreOutputs, replies: tuple[Answer, ...] = ()) -> bytes | None:
    """Return the message, or None if it is too long."""
    try:
        return pack(Outputs.of(outputs, replies))
    except MessageError:
        return None
