"""Checks whether the engine's parts can use a KV connector, and creates its scheduler side.

The worker creates the worker side itself. This module does not depend on a specific connector.
"""

from __future__ import annotations

import inspect
from contextlib import ExitStack

from dovetail.config import EngineConfig
from dovetail.errors import ConfigError, ContractError
from dovetail.executors.output_aggregator import RankedSide
from dovetail.interfaces import KVCacheConfig, KVConnectorContext, KVSchedulerSide
from dovetail.plugins import PluginRegistry
from dovetail.plugins.capabilities import declared_ids
from dovetail.plugins.construction import construct

CAPABILITY = "kv_connector"
"""Workers and schedulers that support KV connectors declare this capability."""


def check_kv_connector(config: EngineConfig, worker_cls: type, scheduler_cls: type) -> None:
    """Raise an error if the user named a KV connector that would not be used.

    Raises ContractError if worker or scheduler does not support connectors, ConfigError if the
    prefix cache is disabled.
    """
    reference = config.extensions.kv_connector
    if reference is None:
        return
    for kind, cls in (("worker", worker_cls), ("scheduler", scheduler_cls)):
        if CAPABILITY not in declared_ids(cls, "provides"):
            raise ContractError(
                f"kv_connector={reference!r} is set, but the {kind} {cls.__qualname__} would "
                f"ignore it, because its `provides` does not contain {CAPABILITY!r}. Choose "
                f"another {kind}_cls, or omit kv_connector."
            )
    if not config.cache.enable_prefix_caching:
        raise ConfigError(
            f"kv_connector={reference!r} needs the prefix cache, but enable_prefix_caching=False; "
            "omit one of the two options."
        )


def make_scheduler_side(
    config: EngineConfig, plugins: PluginRegistry, kv_cache: KVCacheConfig, undo: ExitStack
) -> KVSchedulerSide | None:
    """Return the scheduler side of the connector that `config` names, or None without a connector.

    undo: gets the `shutdown` of the created side. Raises PluginError if it cannot be loaded or
    created.
    """
    reference = config.extensions.kv_connector
    if reference is None:
        return None
    cls = plugins.load("kv_connector", reference)
    options = plugins.options_of("kv_connector", cls)
    context = KVConnectorContext(config=config.worker_config(), kv_cache=kv_cache, options=options)
    side: KVSchedulerSide = construct("kv_connector", cls.create_scheduler_side, context)
    undo.callback(side.shutdown)
    num_ranks = config.parallel.tensor_parallel_size
    if num_ranks == 1:
        return side
    try:
        inspect.signature(side.update).bind(b"", 0)
    except TypeError:
        raise ContractError(
            f"kv_connector={reference!r} cannot be used with tensor_parallel_size={num_ranks}: "
            f"{type(side).__qualname__}.update has no parameter for the rank (see the contract "
            "kv_connector 0.4). Update the plugin, or use one worker."
        ) from None
    return RankedSide(side, num_ranks)
