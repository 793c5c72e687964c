"""The KV connector of an engine: whether its parts can use one, and its scheduler's side.

The worker makes the other side itself. Depends on no connector by name.
"""

from __future__ import annotations

import inspect

from dovetail.config import EngineConfig
from dovetail.errors import ConfigError, ContractError
from dovetail.executors.output_aggregator import RankedSide
from dovetail.interfaces import KVCacheConfig, KVConnectorContext, KVSchedulerSide
from dovetail.plugins import PluginRegistry
from dovetail.plugins.capabilities import declared_ids
from dovetail.plugins.construction import construct

CAPABILITY = "kv_connector"
"""What a worker and a scheduler declare in `provides` if they work with a connector."""


def check_kv_connector(config: EngineConfig, worker_cls: type, scheduler_cls: type) -> None:
    """Raise if a KV connector is named that would not be used.

    ContractError where worker or scheduler does not do it, ConfigError without a prefix cache.
    """
    reference = config.extensions.kv_connector
    if reference is None:
        return
    for kind, cls in (("worker", worker_cls), ("scheduler", scheduler_cls)):
        if CAPABILITY not in declared_ids(cls, "provides"):
            raise ContractError(
                f"kv_connector={reference!r} is named, but the {kind} {cls.__qualname__} does not "
                f"declare {CAPABILITY!r} in `provides`: nothing would be moved. Choose another "
                f"{kind}_cls, or leave it out."
            )
    if not config.cache.enable_prefix_caching:
        raise ConfigError(
            f"kv_connector={reference!r} moves blocks of the prefix cache, but "
            "enable_prefix_caching=False; leave one of them out."
        )


def make_scheduler_side(
    config: EngineConfig, plugins: PluginRegistry, kv_cache: KVCacheConfig
) -> KVSchedulerSide | None:
    """Return the scheduler's side of the connector that `config` names, None for none.

    Raises PluginError if it cannot be loaded or made.
    """
    reference = config.extensions.kv_connector
    if reference is None:
        return None
    cls = plugins.load("kv_connector", reference)
    options = plugins.options_of("kv_connector", cls)
    context = KVConnectorContext(config=config.worker_config(), kv_cache=kv_cache, options=options)
    side: KVSchedulerSide = construct("kv_connector", cls.create_scheduler_side, context)
    num_ranks = config.parallel.tensor_parallel_size
    if num_ranks == 1:
        return side
    try:
        inspect.signature(side.update).bind(b"", 0)
    except TypeError:
        raise ContractError(
            f"kv_connector={reference!r} cannot be used with tensor_parallel_size={num_ranks}: "
            f"{type(side).__qualname__}.update must take the rank of an answer, too (contract "
            "kv_connector 0.4)."
        ) from None
    return RankedSide(side, num_ranks)
