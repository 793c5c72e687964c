"""Outputs on their way to the front end: cut to messages, and held back while it does not read.

A step's outputs may be more than one message may hold (log-probabilities of a long prompt); they
are cut then, and one message after the other says what the whole says. The front end tells how
many messages it has taken; while too many, or too many bytes, are not taken, the engine makes no
step. It goes on to do what comes in, so that aborts, calls and the end are never held up.
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
"""Messages with outputs that may be on their way; a front end takes all that there are at once."""

MAX_UNREAD_BYTES = 64 << 20
MAX_KEPT_BYTES = 2 * MAX_UNREAD_BYTES
"""Most that is kept for a front end that does not read, while others are served."""

FLOOD = 16
"""How many times that much ends a front end that only calls, and does not read the answers."""

ACKNOWLEDGE_EVERY = 16
"""The front end tells what it has taken after this many messages."""

MESSAGE_WORK = 1 << 16
"""Tokens in a message, up to 16 bytes each, or as much work in log-probabilities: 128 bytes."""


class OutputWindow:
    """Counts the messages that the front end has not taken yet."""

    def __init__(self) -> None:
        self._sizes: deque[int] = deque()
        self._num_bytes = 0

    @property
    def is_full(self) -> bool:
        """Whether no step may be made until the front end has taken some messages."""
        # Of fewer than `ACKNOWLEDGE_EVERY` the front end may have taken all and told nothing.
        too_large = self._num_bytes >= MAX_UNREAD_BYTES and len(self._sizes) >= ACKNOWLEDGE_EVERY
        return too_large or len(self._sizes) >= MAX_UNREAD_MESSAGES

    @property
    def is_overflowing(self) -> bool:
        """Whether more is on its way than is kept for a front end."""
        return self._num_bytes > MAX_KEPT_BYTES

    @property
    def is_flooded(self) -> bool:
        """Whether a front end without requests is sent answers that it does not read."""
        return self._num_bytes > FLOOD * MAX_KEPT_BYTES

    def sent(self, num_bytes: int) -> None:
        """Note that a message with outputs was sent."""
        self._sizes.append(num_bytes)
        self._num_bytes += num_bytes

    def taken(self, num_messages: int) -> None:
        """Note that the front end has taken so many more; more than were sent count as all."""
        for _ in range(min(num_messages, len(self._sizes))):
            self._num_bytes -= self._sizes.popleft()


def pack_outputs(outputs: EngineCoreOutputs, answers: tuple[Answer, ...] = ()) -> Iterator[bytes]:
    """Yield a step's outputs as messages, each of them within the limit.

    answers: go with the first one. The statistics go with the last one.
    """
    if work_of(outputs) <= MESSAGE_WORK:
        whole = _try_pack(outputs, answers)
        if whole is not None:
            yield whole
            return
    yield pack(Outputs.of(EngineCoreOutputs(), answers))
    yield from _pack_pieces(replace(outputs, stats=None), MESSAGE_WORK)
    yield pack(Outputs.of(EngineCoreOutputs(stats=outputs.stats)))


def _pack_pieces(outputs: EngineCoreOutputs, most: int) -> Iterator[bytes]:
    for piece in cut_outputs(outputs, most):
        content = _try_pack(piece)
        if content is not None:
            yield content
        elif most > 1:  # few entries, and long ids or reasons
            yield from _pack_pieces(piece, most // 8)
        else:
            yield pack(Outputs.of(piece))


def _try_pack(outputs: EngineCoreOutputs, answers: tuple[Answer, ...] = ()) -> bytes | None:
    """Return the message, or None if it is too long."""
    try:
        return pack(Outputs.of(outputs, answers))
    except MessageError:
        return None
