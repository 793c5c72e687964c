"""How the workers of one engine find each other, and who is turned away.

The platform makes the group of ranks; torch's default process group is neither made nor used, so
that two engines in one process do not meet. Depends on no device, no layer and no backend.
"""

from __future__ import annotations

import hashlib
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import torch

from dovetail.errors import ConfigError, PeerLostError
from dovetail.interfaces import ONE_RANK, RankGroup, WorkerContext
from dovetail_torch.device_runtime import DeviceRuntime

COLLECTIVES = "collectives"
"""Capability id of platforms whose runtime joins ranks."""

_PATIENCE = timedelta(minutes=10)
"""How long a rank waits for the others: one may still read weights when another has its own."""


def join_ranks(context: WorkerContext, runtime: DeviceRuntime, device: torch.device) -> RankGroup:
    """Find the other workers of `context`'s engine and return the group; ONE_RANK if alone.

    Waits until all have come. Raises ConfigError for numbers that contradict each other, a
    platform without collectives and ranks of unlike configuration, PeerLostError where some
    do not come.
    """
    _check(context)
    rank, size = context.rank, context.world_size
    if size == 1:
        return ONE_RANK
    from torch.distributed.rendezvous import rendezvous  # dear, and only for several ranks

    try:
        store, _, _ = next(rendezvous(context.rendezvous, rank, size, timeout=_PATIENCE))
        store.set_timeout(_PATIENCE)
        ranks = runtime.join(store, rank=rank, size=size, timeout=_PATIENCE)
    except (RuntimeError, ValueError) as error:
        raise PeerLostError(
            f"rank {rank} of {size} does not find the others at {context.rendezvous!r}: "
            f"{_first_line(error)}"
        ) from error
    _check_likeness(ranks, context, device)
    _check_invariance(ranks, context)
    return ranks


def _check(context: WorkerContext) -> None:
    """Raise ConfigError where the context's numbers do not make a rank of an engine."""
    rank, size = context.rank, context.world_size
    asked = context.config.tensor_parallel_size
    if size != asked or not 0 <= rank < size:
        raise ConfigError(
            f"tensor_parallel_size={asked} is asked, but this worker is rank {rank} of {size}: "
            "choose an executor that starts so many workers (executor_backend='auto'), or give "
            f"tensor_parallel_size={max(1, size)}."
        )
    if size == 1:
        return
    if COLLECTIVES not in context.platform.capabilities():
        raise ConfigError(
            f"tensor_parallel_size={asked} is asked, but the platform "
            f"{context.platform.info.name!r} does not declare {COLLECTIVES!r}: choose another "
            "platform, or give tensor_parallel_size=1."
        )
    place = urlsplit(context.rendezvous)
    # torch would wait for minutes for a folder to be made.
    there = place.scheme == "tcp" or (place.scheme == "file" and Path(place.path).parent.is_dir())
    if not there:
        raise ConfigError(
            f"tensor_parallel_size={asked} is asked, but the rendezvous {context.rendezvous!r} is "
            "no file:// URL in a folder that exists and no tcp:// URL: the executor has to name a "
            "place where its workers meet."
        )


def _check_likeness(ranks: RankGroup, context: WorkerContext, device: torch.device) -> None:
    """Raise ConfigError where rank 0 runs something else: their tensors would not be alike."""
    facts = (torch.__version__, context.config)
    digest = hashlib.blake2b(repr(facts).encode(), digest_size=16).digest()
    own = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(device)
    if not torch.equal(ranks.broadcast(own.clone()), own):
        raise ConfigError(
            f"rank {ranks.rank} of {ranks.size} has another configuration or version of torch than "
            "rank 0: start all workers of an engine alike, each engine with its own rendezvous."
        )


def _check_invariance(ranks: RankGroup, context: WorkerContext) -> None:
    """Raise ConfigError where batch invariance is asked and sums depend on the batch."""
    if ranks.batch_invariant or not context.config.compute.batch_invariant:
        return
    raise ConfigError(
        f"batch_invariant=True is asked with tensor_parallel_size={ranks.size}, but sums over so "
        "many ranks depend on the size of the batch here: give tensor_parallel_size=2 or 1, or "
        "leave batch_invariant out."
    )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
