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
"""A front end that sent no message during this many heartbeats gets one of this many after that."""

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
class FrontEndPeer:
    """The engine's state of one front end.

    live: the front end's ids of its unfinished requests, by the core's ids. responses: results of
    calls, sent with the next outputs.
    last_stats: the last statistics sent. wants_stats: whether the front end has made a call since
    then, so that new statistics are sent even if none of its requests runs. num_beats: heartbeats
    since its last message. num_behind: heartbeats for which it has had too many unread outputs.
    translates: whether its ids and the core's may differ.
    """

    name: bytes
    number: int
    window: OutputWindow = field(default_factory=OutputWindow)
    live: dict[str, str] = field(default_factory=dict)
    responses: list[Answer] = field(default_factory=list)
    last_stats: SchedulerStats | None = None
    wants_stats: bool = True
    num_beats: int = 0
    num_behind: int = 0
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

    def is_too_far_behind(self) -> bool:
        """Whether the front end has been too slow for about a second. Called at each heartbeat."""
        self.num_behind = self.num_behind + 1 if self.window.is_overflowing else 0
        return self.num_behind >= _MAX_BEHIND

    def has_news(self, outputs: EngineCoreOutputs) -> bool:
        """Return whether these outputs contain anything for this front end."""
        stats, last = outputs.stats, self.last_stats
        if outputs.request_ids or outputs.finished or stats is None or last is None:
            return True
        if stats.num_scheduled_tokens:
            return True
        return any(getattr(stats, name) != getattr(last, name) for name in GAUGES)


_Part = tuple[FrontEndPeer, EngineCoreOutputs]


class FrontEnds:
    """All front ends of an engine, and the socket to them. The caller owns the socket."""

    def __init__(self, outbox: zmq.Socket[bytes], ready: Ready) -> None:
        """Start without front ends. ready: the first message to each front end."""
        self._ready = ready
        self.owner = FrontEndPeer(OWNER, 0)
        self._outbox = outbox
        self._peers = {OWNER: self.owner}
        self._num_attached = 0

    def __iter__(self) -> Iterator[FrontEndPeer]:
        """Iterate over the front ends. They may be removed during the iteration."""
        return iter(list(self._peers.values()))

    def find(self, name: bytes) -> FrontEndPeer | None:
        """Return the front end of this name, or None."""
        return self._peers.get(name)

    def attach(self, name: bytes) -> FrontEndPeer | None:
        """Add a front end and send it `Ready`.

        Returns None if the front end is not connected yet; it then sends Hello again.
        """
        peer = FrontEndPeer(name, self._num_attached + 1)
        ready = msgspec.structs.replace(self._ready, front_end=peer.number)
        if not self.send(peer, pack(ready), counts=False):
            return None
        self._num_attached += 1
        self._peers[name] = peer
        return peer

    def remove(self, peer: FrontEndPeer) -> None:
        """Remove a front end."""
        self._peers.pop(peer.name, None)

    def may_step(self) -> bool:
        """Whether a step may run: False while all front ends with outputs read too slowly."""
        peers = self._peers.values()
        if not any(peer.window.is_full for peer in peers):
            return True
        return any(peer.live and not peer.window.is_full for peer in peers)

    def send(self, peer: FrontEndPeer, content: bytes, *, counts: bool = True) -> bool:
        """Send a message. Return False if the front end is disconnected.

        counts: whether the message counts towards the front end's window.
        """
        fault("engine.send")
        try:
            self._outbox.send(peer.name, zmq.SNDMORE)
            self._outbox.send(content)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise
        if counts:
            peer.window.sent(len(content))
        return True

    def send_outputs(self, outputs: EngineCoreOutputs) -> list[FrontEndPeer]:
        """Send each front end its part of a step's outputs. Return disconnected front ends."""
        disconnected = []
        alone = len(self._peers) == 1
        for peer, part in self._split(outputs):
            if not peer.responses and not self._concerns(peer, part, alone=alone):
                continue
            for content in pack_outputs(part, tuple(peer.responses)):
                if not self.send(peer, content):
                    disconnected.append(peer)
                    break
            peer.responses.clear()
            peer.last_stats = part.stats
            peer.wants_stats = bool(peer.live)
        return disconnected

    def is_beat_due(self, peer: FrontEndPeer) -> bool:
        """Return whether to send this heartbeat. A front end that sends no messages gets fewer."""
        peer.num_beats += 1
        return peer.num_beats <= _QUIET_BEATS or peer.num_beats % _QUIET_BEATS == 0

    def _concerns(self, peer: FrontEndPeer, part: EngineCoreOutputs, *, alone: bool) -> bool:
        if not alone and not (peer.live or peer.wants_stats or part.finished):
            return False
        return peer.has_news(part)

    def _split(self, outputs: EngineCoreOutputs) -> list[_Part]:
        """Return each front end with its part of the outputs. Removes ended requests."""
        if len(self._peers) == 1 and not self.owner.translates:
            for ending in outputs.finished:
                self.owner.live.pop(ending.request_id, None)
            return [(self.owner, outputs)]
        return [(peer, _part_of(peer, outputs)) for peer in self]


def _part_of(peer: FrontEndPeer, outputs: EngineCoreOutputs) -> EngineCoreOutputs:
    """Return the outputs of one front end's requests, by its own ids."""
    live = peer.live
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
