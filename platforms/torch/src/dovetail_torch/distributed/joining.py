"""How the workers of one engine form a group of ranks.

The platform creates the group; torch's default process group is not used, so that two engines in
one process do not interfere. This module does not depend on devices, layers or backends.
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

_SHARED = "tensor_parallel"
"""Capability id of models that several ranks can share."""

_PATIENCE = timedelta(minutes=10)
"""How long a rank waits for other ranks, which may still be loading weights."""


def join_ranks(context: WorkerContext, runtime: DeviceRuntime, device: torch.device) -> RankGroup:
    """Connect to the other workers of `context`'s engine. Return their group, or ONE_RANK.

    Waits until all workers have joined. Raises ConfigError if the context's numbers contradict each
    other, the platform has no collectives, or the ranks have different configurations. Raises
    PeerLostError if a rank does not join.
    """
    _check(context)
    rank, size = context.rank, context.world_size
    if size == 1:
        return ONE_RANK
    from torch.distributed.rendezvous import rendezvous  # slow to import

    try:
        store, _, _ = next(rendezvous(context.rendezvous, rank, size, timeout=_PATIENCE))
        store.set_timeout(_PATIENCE)
        ranks = runtime.join(store, rank=rank, size=size, timeout=_PATIENCE)
    except (RuntimeError, ValueError) as error:
        raise PeerLostError(
            f"rank {rank} of {size} could not connect to the other ranks at "
            f"{context.rendezvous!r}: {_first_line(error)}"
        ) from error
    _check_likeness(ranks, context, device)
    _check_invariance(ranks, context)
    return ranks


def check_shared(model_cls: type, ranks: RankGroup) -> None:
    """Raise ConfigError if there are several ranks and the model does not support them."""
    if ranks.size == 1 or _SHARED in getattr(model_cls, "provides", ()):
        return
    raise ConfigError(
        f"tensor_parallel_size={ranks.size} was requested, but the model "
        f"{model_cls.__name__} does not declare {_SHARED!r} in `provides`: its code "
        "may need all features on one rank. Set tensor_parallel_size=1, or choose a "
        "model that declares it."
    )


def _check(context: WorkerContext) -> None:
    """Raise ConfigError if the context's numbers do not describe a rank of an engine."""
    rank, size = context.rank, context.world_size
    expected_size = context.config.tensor_parallel_size
    if size != expected_size or not 0 <= rank < size:
        raise ConfigError(
            f"tensor_parallel_size={expected_size} was requested, but this worker is rank {rank} "
            f"of {size}: choose an executor that starts enough workers (executor_backend='auto'), "
            f"or set tensor_parallel_size={max(1, size)}."
        )
    if size == 1:
        return
    if COLLECTIVES not in context.platform.capabilities():
        raise ConfigError(
            f"tensor_parallel_size={expected_size} was requested, but the platform "
            f"{context.platform.info.name!r} does not declare {COLLECTIVES!r}: choose another "
            "platform, or set tensor_parallel_size=1."
        )
    url = urlsplit(context.rendezvous)
    # torch would wait for minutes for a directory that does not exist.
    there = url.scheme == "tcp" or (url.scheme == "file" and Path(url.path).parent.is_dir())
    if not there:
        raise ConfigError(
            f"tensor_parallel_size={expected_size} was requested, but the rendezvous "
            f"{context.rendezvous!r} is neither a file:// URL in an existing directory nor a "
            "tcp:// URL: the executor must provide one of them."
        )


def _check_likeness(ranks: RankGroup, context: WorkerContext, device: torch.device) -> None:
    """Raise ConfigError if rank 0 has a different configuration.

    The shapes of its tensors could differ, too.
    """
    settings = (torch.__version__, context.config)
    digest = hashlib.blake2b(repr(settings).encode(), digest_size=16).digest()
    own = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(device)
    if not torch.equal(ranks.broadcast(own.clone()), own):
        raise ConfigError(
            f"rank {ranks.rank} of {ranks.size} differs from rank 0 in its configuration or "
            "version of torch: start all workers of an engine in the same way, and use a separate "
            "rendezvous for each engine."
        )


def _check_invariance(ranks: RankGroup, context: WorkerContext) -> None:
    """Raise ConfigError if batch invariance is required, but all-reduces depend on the batch."""
    if ranks.batch_invariant or not context.config.compute.batch_invariant:
        return
    raise ConfigError(
        f"batch_invariant=True is not supported with tensor_parallel_size={ranks.size}: "
        "on this platform, all-reduces over more than two ranks depend on the batch; set "
        "tensor_parallel_size to 2 or 1, or remove batch_invariant."
    )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
