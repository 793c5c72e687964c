"""The capability ids that the core provides or checks.

Platforms and plugins may define further ids and require them of each other. Only the ids in this
module are checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from dovetail.errors import ContractError
from dovetail.plugins.contracts.checks import load_interface, member_problems

DEVICE_PREFIX = "device."
"""Prefix of the capability ids for a platform's devices."""

CORE_CAPABILITIES = frozenset(
    {"async_scheduling", "chunked_prefill", "paged_kv_cache", "preemption", "prefix_caching"}
)
"""The capabilities that the core provides on every platform."""

DESCRIBES_ATTENTION = "describes_attention"
"""The capability of a worker that describes a model's attention before the model is loaded."""

CLAIMS: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("worker", DESCRIBES_ATTENTION): "dovetail.interfaces.worker:DescribesAttention",
        ("model", "pooling"): "dovetail.interfaces.model:PoolingModel",
        ("worker", "model"): "dovetail.interfaces.worker:ProvidesModel",
        ("worker", "profile"): "dovetail.interfaces.worker:Profiles",
        ("worker", "sleep"): "dovetail.interfaces.worker:Sleeps",
    }
)
"""Maps (kind, capability id) to the contract that a class with this capability must meet."""


def declared_ids(cls: type[Any], attribute: str) -> frozenset[str]:
    """Return `provides` or `needs` of a class: a set of capability ids.

    A missing attribute means the empty set. Raises ContractError for other types.
    """
    ids: object = getattr(cls, attribute, frozenset())
    if isinstance(ids, property) or callable(ids):
        return frozenset()
    if not isinstance(ids, (set, frozenset)) or not all(isinstance(item, str) for item in ids):
        raise ContractError(
            f"{cls.__module__}:{cls.__qualname__} has {attribute} = {ids!r}; write a frozenset of "
            "capability ids."
        )
    return frozenset(ids)


def check_claims(kind: str, cls: type[Any], provides: frozenset[str]) -> None:
    """Raise ContractError if `cls` lacks members of an optional contract that it claims."""
    problems = [
        f"\n  - it claims {capability!r}: {problem}"
        for capability in sorted(provides)
        for problem in _claim_problems(kind, cls, capability)
    ]
    if problems:
        raise ContractError(
            f"{cls.__module__}:{cls.__qualname__} claims capabilities without their methods."
            f"{''.join(problems)}\n"
            "Implement the methods, or remove the ids from `provides`."
        )


def _claim_problems(kind: str, cls: type[Any], capability: str) -> Iterator[str]:
    target = CLAIMS.get((kind, capability))
    if target is not None:
        yield from member_problems(load_interface(target), cls)
