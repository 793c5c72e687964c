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
    is_sketch: the contract has no implementation, suite and fake yet; its first implementer may
        still change it.
    """

    name: str
    group: str
    contract: str
    is_sketch: bool = False


def _kind(name: str, interface: str, *, is_sketch: bool = False) -> tuple[str, Kind]:
    contract = f"dovetail.interfaces.{name}:{interface}"
    group = f"{GROUP_PREFIX}{name}"
    return name, Kind(name=name, group=group, contract=contract, is_sketch=is_sketch)


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
            _kind("logits_processor", "LogitsProcessor"),
            _kind("step_extension", "StepExtension"),
            _kind("io_processor", "IOProcessor"),
            _kind("stat_logger", "StatLogger"),
            _kind("hooks", "Hooks"),
            _kind("worker_extension", "WorkerExtension"),
            _kind("grammar", "GrammarBackend", is_sketch=True),
            _kind("proposer", "Proposer", is_sketch=True),
            _kind("kv_connector", "KVConnector"),
            _kind("tool_parser", "ToolParser", is_sketch=True),
            _kind("reasoning_parser", "ReasoningParser", is_sketch=True),
            _kind("http_routes", "HTTPRoutes", is_sketch=True),
            _kind("compile_backend", "CompileBackend", is_sketch=True),
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
