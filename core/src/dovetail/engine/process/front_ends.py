"""The front ends of an engine: their requests, their outputs, and their disconnection.

Each front end has a name (the identity of its sockets), a number, requests and a flow-control
window. The engine adds the number to request ids, so that a front end cannot refer to requests of
other front ends. Number 0 is the front end that started the engine: its ids are not changed. Does
not depend on an engine.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import msgspec
import zmq

from dovetail.engine.process.link import OWNER
from dovetail.engine.process.outgoing import OutputWindow, pack_outputs
from dovetail.faults import fault
from dovetail.interfaces import EngineCoreOutputs, SchedulerStats
from dovetail.transport.messages import Answer, Ready, pack

V = TypeVar("V")

_SCOPE = "\x1f"
"""Separates the number of a front end from the rest of a request id in the engine core."""

_QUIET_BEATS = 60
"""n: a front end that sent no message during n heartbeats then receives only every n-th."""

_MAX_BEHIND = 2
"""Number of heartbeats after which the requests of a front end that reads too slowly are
aborted."""

GAUGES = (
    "num_waiting",
    "num_running",
    "num_used_blocks",
    "num_aborted",
    "num_preemptions",
    "policy_failures",
)
"""Statistics that are sent when they change, even if nothing ran."""


@dataclass(eq=False)
class FrontEndState:
    """What the engine knows about one front end.

    live: the unfinished requests, as a map from the core's ids to the front end's ids. responses:
    results of calls, sent with the next outputs.
    last_stats: the last statistics sent. wants_stats: whether the front end has made a call since
    then, so that new statistics are sent even if none of its requests runs. num_heartbeats:
    heartbeats since its last message. num_slow_heartbeats: consecutive heartbeats at which it had
    too many unread outputs. translates: whether its ids and the core's may differ.
    """

    name: bytes
    number: int
    window: OutputWindow = field(default_factory=OutputWindow)
    live: dict[str, str] = field(default_factory=dict)
    responses: list[Answer] = field(default_factory=list)
    last_stats: SchedulerStats | None = None
    wants_stats: bool = True
    num_heartbeats: int = 0
    num_slow_heartbeats: int = 0
    translates: bool = False

    @property
    def is_owner(self) -> bool:
        """Whether this front end has started the engine."""
        return self.number == 0

    def scope(self, request_id: str) -> str:
        """Return the core's id for a request of this front end, unique among front ends."""
        if self.is_owner and _SCOPE not in request_id:
            return request_id
        self.translates = True
        return f"{request_id}{_SCOPE}{self.number}"

    def is_too_slow(self) -> bool:
        """Whether the front end has been too slow for about a second. Called at each heartbeat."""
        self.num_slow_heartbeats = self.num_slow_heartbeats + 1 if self.window.is_overflowing else 0
        return self.num_slow_heartbeats >= _MAX_BEHIND

    def has_new_outputs(self, outputs: EngineCoreOutputs) -> bool:
        """Return whether these outputs contain anything for this front end."""
        stats, last = outputs.stats, self.last_stats
        if outputs.request_ids or outputs.finished or stats is None or last is None:
            return True
        if stats.num_scheduled_tokens:
            return True
        return any(getattr(stats, name) != getattr(last, name) for name in GAUGES)


_Part = tuple[FrontEndState, EngineCoreOutputs]


class FrontEnds:
    """All front ends of an engine, and the socket to them. The caller owns the socket."""

    def __init__(self, outbox: zmq.Socket[bytes], ready: Ready) -> None:
        """Create an empty collection. ready: the first message to each front end."""
        self._ready = ready
        self.owner = FrontEndState(OWNER, 0)
        self._outbox = outbox
        self._states = {OWNER: self.owner}
        self._num_attached = 0

    def __iter__(self) -> Iterator[FrontEndState]:
        """Iterate over the front ends. They may be removed during the iteration."""
        return iter(list(self._states.values()))

    def find(self, name: bytes) -> FrontEndState | None:
        """Return the front end of this name, or None."""
        return self._states.get(name)

    def attach(self, name: bytes) -> FrontEndState | None:
        """Add a front end and send it `Ready`.

        Returns None if the front end is not connected yet; it then sends Hello again.
        """
        front_end = FrontEndState(name, self._num_attached + 1)
        ready = msgspec.structs.replace(self._ready, front_end=front_end.number)
        if not self.send(front_end, pack(ready), counts=False):
            return None
        self._num_attached += 1
        self._states[name] = front_end
        return front_end

    def remove(self, front_end: FrontEndState) -> None:
        """Remove a front end."""
        self._states.pop(front_end.name, None)

    def may_step(self) -> bool:
        """Whether a step may run: False while all front ends with outputs read too slowly."""
        front_ends = self._states.values()
        if not any(front_end.window.is_full for front_end in front_ends):
            return True
        return any(front_end.live and not front_end.window.is_full for front_end in front_ends)

    def send(self, front_end: FrontEndState, content: bytes, *, counts: bool = True) -> bool:
        """Send a message. Return False if the front end is disconnected.

        counts: whether the message counts towards the front end's window.
        """
        fault("engine.send")
        try:
            self._outbox.send(front_end.name, zmq.SNDMORE)
            self._outbox.send(content)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise
        if counts:
            front_end.window.sent(len(content))
        return True

    def send_outputs(self, outputs: EngineCoreOutputs) -> list[FrontEndState]:
        """Send each front end its part of a step's outputs. Return disconnected front ends."""
        disconnected = []
        alone = len(self._states) == 1
        for front_end, part in self._split(outputs):
            if not front_end.responses and not self._concerns(front_end, part, alone=alone):
                continue
            for content in pack_outputs(part, tuple(front_end.responses)):
                if not self.send(front_end, content):
                    disconnected.append(front_end)
                    break
            front_end.responses.clear()
            front_end.last_stats = part.stats
            front_end.wants_stats = bool(front_end.live)
        return disconnected

    def is_heartbeat_due(self, front_end: FrontEndState) -> bool:
        """Return whether to send this heartbeat. A silent front end gets only some of them."""
        front_end.num_heartbeats += 1
        return (
            front_end.num_heartbeats <= _QUIET_BEATS or front_end.num_heartbeats % _QUIET_BEATS == 0
        )

    def _concerns(self, front_end: FrontEndState, part: EngineCoreOutputs, *, alone: bool) -> bool:
        if not alone and not (front_end.live or front_end.wants_stats or part.finished):
            return False
        return front_end.has_new_outputs(part)

    def _split(self, outputs: EngineCoreOutputs) -> list[_Part]:
        """Return each front end with its part of the outputs. Removes ended requests."""
        if len(self._states) == 1 and not self.owner.translates:
            for ending in outputs.finished:
                self.owner.live.pop(ending.request_id, None)
            return [(self.owner, outputs)]
        return [(front_end, _part_of(front_end, outputs)) for front_end in self]


def _part_of(front_end: FrontEndState, outputs: EngineCoreOutputs) -> EngineCoreOutputs:
    """Return the outputs of one front end's requests, with its own request ids."""
    live = front_end.live
    names: list[str] = []
    counts, tokens = array("i"), array("i")
    end = 0
    for core_id, count in zip(outputs.request_ids, outputs.num_new_tokens, strict=True):
        start, end = end, end + count
        if (name := live.get(core_id)) is not None:
            names.append(name)
            counts.append(count)
            tokens.extend(outputs.token_ids[start:end])
    part = EngineCoreOutputs(
        request_ids=names,
        num_new_tokens=counts,
        token_ids=tokens,
        finished=tuple(
            replace(ending, request_id=live[ending.request_id])
            for ending in outputs.finished
            if ending.request_id in live
        ),
        logprobs=_own(outputs.logprobs, live),
        prompt_logprobs=_own(outputs.prompt_logprobs, live),
        pooled=_own(outputs.pooled, live),
        num_cached_tokens=_own(outputs.num_cached_tokens, live),
        admitted_ns=_own(outputs.admitted_ns, live),
        stats=outputs.stats,
    )
    for ending in outputs.finished:
        live.pop(ending.request_id, None)
    return part


def _own(by_request: Mapping[str, V], live: Mapping[str, str]) -> dict[str, V]:
    return {live[name]: value for name, value in by_request.items() if name in live}
