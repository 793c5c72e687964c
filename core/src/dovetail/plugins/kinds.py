"""The kinds of plugin: each with its entry-point group and the contract that its classes meet.

A kind is here once its contract stands in `dovetail.interfaces`. Contracts are named, not imported:
listing plugins loads nothing. Knows no plugin by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from dovetail.errors import PluginNotFoundError, nearest

GROUP_PREFIX = "dovetail."
"""What the entry-point groups of all kinds begin with."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of plugin.

    group: its entry-point group. contract: "module:Class" of the interface that its classes meet.
    """

    name: str
    group: str
    contract: str


def _kind(name: str, interface: str) -> tuple[str, Kind]:
    contract = f"dovetail.interfaces.{name}:{interface}"
    return name, Kind(name=name, group=f"{GROUP_PREFIX}{name}", contract=contract)


KINDS: Mapping[str, Kind] = MappingProxyType(
    dict(
        [
            _kind("platform", "Platform"),
            _kind("worker", "WorkerBase"),
            _kind("executor", "Executor"),
            _kind("scheduler", "SchedulerInterface"),
            _kind("policy", "Policy"),
            _kind("attention", "AttentionBackend"),
            _kind("model", "Model"),
            _kind("weight_loader", "WeightLoader"),
            _kind("linear_method", "LinearMethod"),
            _kind("ops", "Ops"),
            _kind("tokenizer", "Tokenizer"),
        ]
    )
)
"""Every kind by its name."""


def get_kind(name: str) -> Kind:
    """Return the kind called `name`; raise PluginNotFoundError naming the kinds there are."""
    kind = KINDS.get(name)
    if kind is None:
        raise PluginNotFoundError(
            f"There is no plugin kind {name!r}.{nearest(name, KINDS)} Kinds: {', '.join(KINDS)}."
        )
    return kind
