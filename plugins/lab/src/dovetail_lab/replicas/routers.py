"""Routers choose the replica of each request. They never see output lengths.

A router is a class without constructor arguments. It is named by a key of `ROUTERS`, or as
"pkg.mod:Class" or "/file.py:Class".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from dovetail.errors import UserError, nearest
from dovetail.plugins.loading import Origin, find_attribute, load_file, load_target
from dovetail_lab.workloads.workload import HASH_BLOCK_TOKENS, WorkloadRequest

MAX_PREFIXES = 100_000
"""Maximum number of prefix blocks that the prefix-aware router remembers per replica."""

MAX_LOAD_RATIO = 1.5
"""The prefix-aware router prefers a cached prefix only while the replica's load is at most this
multiple of the lowest load, plus `LOAD_SLACK` requests."""

LOAD_SLACK = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """The load of a replica at the arrival of a request.

    num_waiting, num_running: requests in the replica's scheduler after the step in progress.
    num_unfinished: all requests that were sent to the replica and have not ended.
    num_prompt_tokens: prompt tokens of the unfinished requests.
    """

    num_waiting: int
    num_running: int
    num_unfinished: int
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivingRequest:
    """The properties of a request that a router may use.

    The fields are those of `WorkloadRequest`.
    """

    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    tenant: str
    priority: int
    session: str
    parent: str
    prefix_hashes: tuple[int, ...]

    @classmethod
    def of(cls, request: WorkloadRequest) -> ArrivingRequest:
        """Return the visible part of a request."""
        return cls(**{name: getattr(request, name) for name in cls.__slots__})


class Router(ABC):
    """Chooses a replica for each request, in order of arrival."""

    @abstractmethod
    def choose(self, request: ArrivingRequest, replicas: Sequence[ReplicaLoad]) -> int:
        """Return the index of a replica."""


class RoundRobin(Router):
    """Sends requests to the replicas in turn."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: ArrivingRequest, replicas: Sequence[ReplicaLoad]) -> int:
        """Return the replica after the most recently chosen one."""
        index = self._next % len(replicas)
        self._next = index + 1
        return index


class LeastLoad(Router):
    """Sends each request to the replica with the fewest unfinished requests."""

    def choose(self, request: ArrivingRequest, replicas: Sequence[ReplicaLoad]) -> int:
        """Return the replica with the lowest load, or the first of several with that load."""
        return least_loaded(replicas)


class SessionAffinity(Router):
    """Sends all requests of a session to the same replica, and others to the least loaded one."""

    def choose(self, request: ArrivingRequest, replicas: Sequence[ReplicaLoad]) -> int:
        """Return the replica of the session, given by a hash of the session's name."""
        if not request.session:
            return least_loaded(replicas)
        digest = blake2b(request.session.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") % len(replicas)


class PrefixAware(Router):
    """Sends a request to the replica that probably has most of its prefix cached.

    The router remembers which prefix blocks it has sent to each replica. It does not know which
    blocks the replica has evicted. A replica with a much higher load than others is not preferred.
    """

    def __init__(self) -> None:
        self._known: list[OrderedDict[int | str, int]] = []

    def choose(self, request: ArrivingRequest, replicas: Sequence[ReplicaLoad]) -> int:
        """Return the replica with the longest known prefix, except replicas with a high load."""
        while len(self._known) < len(replicas):
            self._known.append(OrderedDict())
        lowest = least_loaded(replicas)
        limit = MAX_LOAD_RATIO * replicas[lowest].num_unfinished + LOAD_SLACK
        lengths = [
            self._num_known_tokens(request, known) if load.num_unfinished <= limit else 0
            for known, load in zip(self._known, replicas, strict=True)
        ]
        longest = max(lengths)
        index = lengths.index(longest) if longest else lowest
        self._remember(request, self._known[index])
        return index

    def _num_known_tokens(
        self, request: ArrivingRequest, known: OrderedDict[int | str, int]
    ) -> int:
        if request.parent:
            return min(known.get(request.parent, 0), request.num_prompt_tokens)
        num_blocks = 0
        for identity in request.prefix_hashes:
            if identity not in known:
                break
            num_blocks += 1
        return min(num_blocks * HASH_BLOCK_TOKENS, request.num_prompt_tokens)

    def _remember(self, request: ArrivingRequest, known: OrderedDict[int | str, int]) -> None:
        known[request.request_id] = request.num_prompt_tokens
        for identity in request.prefix_hashes:
            known[identity] = HASH_BLOCK_TOKENS
            known.move_to_end(identity)
        while len(known) > MAX_PREFIXES:
            known.popitem(last=False)


ROUTERS: dict[str, type[Router]] = {
    "round_robin": RoundRobin,
    "least_load": LeastLoad,
    "session": SessionAffinity,
    "prefix": PrefixAware,
}


def least_loaded(replicas: Sequence[ReplicaLoad]) -> int:
    """Return the index of the replica with the fewest unfinished requests."""
    return min(range(len(replicas)), key=lambda index: replicas[index].num_unfinished)


def load_router(reference: str, *, trust_local_code: bool = False) -> Router:
    """Return a new router.

    reference: a key of `ROUTERS`, "pkg.mod:Class" or, with `trust_local_code`, "/file.py:Class".
    Raises UserError for an unknown name or an object that is not a `Router`, PluginLoadError if
    the import fails.
    """
    if reference in ROUTERS:
        return ROUTERS[reference]()
    location, _, name = reference.rpartition(":")
    if not location:
        known = ", ".join(ROUTERS)
        raise UserError(
            f"router={reference!r} is unknown; use {known} or a class.{nearest(reference, ROUTERS)}"
        )
    origin = Origin(reference=reference)
    if location.endswith(".py"):
        if not trust_local_code:
            raise UserError(f"router={reference!r} is a file; add --trust-local-code to run it.")
        cls = find_attribute(load_file(Path(location).resolve(), origin), name, origin)
    else:
        cls = load_target(reference, origin)
    if not (isinstance(cls, type) and issubclass(cls, Router)):
        raise UserError(f"router={reference!r} is not a subclass of Router.")
    return cls()
