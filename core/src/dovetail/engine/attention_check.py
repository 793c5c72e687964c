"""Checks the attention backend against the model's requirements, before weights are loaded.

The worker class describes the requirements.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dovetail.errors import AttentionUnknownError, ContractError
from dovetail.interfaces.attention import AttentionFacts
from dovetail.interfaces.engine_config import EngineConfig
from dovetail.interfaces.executor import Executor
from dovetail.interfaces.platform import Platform
from dovetail.interfaces.worker import WorkerContext
from dovetail.plugins.attention_requirements import attention_requirements
from dovetail.plugins.capabilities import DESCRIBES_ATTENTION, declared_ids
from dovetail.plugins.construction import call_plugin
from dovetail.plugins.selection import choose_attention

if TYPE_CHECKING:
    from dovetail.plugins import PluginRegistry


def check_attention(
    config: EngineConfig,
    executor_cls: type[Executor],
    worker_cls: type[Any],
    plugins: PluginRegistry,
    platform: Platform,
) -> None:
    """Raise UnfitPluginError if the requested backend does not support the model.

    A worker in this process runs the check itself. Workers in other processes would have to start
    first, so the check runs here, if the worker class can describe the model's attention.
    """
    reference = config.compute.attention_backend
    if executor_cls.takes_callables or not reference:
        return
    if DESCRIBES_ATTENTION not in declared_ids(worker_cls, "provides"):
        return
    try:
        description = described_attention(worker_cls, plugins, config, platform)
    except AttentionUnknownError:
        return
    if description is not None:
        device_type = platform.info.device_type
        required = attention_requirements(description, config.worker_config(), device_type)
        choose_attention(plugins, platform, reference, required)


def described_attention(
    worker_cls: type[Any], plugins: PluginRegistry, config: EngineConfig, platform: Platform
) -> AttentionFacts | None:
    """Return the worker's description of the model's attention, or None if the model has none.

    Raises ContractError for a result of a different type, and the errors of `describe_attention`.
    """
    context = WorkerContext(
        config=config.worker_config(),
        platform=platform,
        plugins=plugins,
        world_size=config.parallel.tensor_parallel_size,
        options=plugins.options_of("worker", worker_cls),
    )
    owner = f"worker {worker_cls.__module__}:{worker_cls.__qualname__}"
    description: object = call_plugin(
        owner, "attention", lambda: worker_cls.describe_attention(context)
    )
    if description is None or isinstance(description, AttentionFacts):
        return description
    raise ContractError(
        f"The {owner} returned {type(description).__name__!r} for describe_attention; it must "
        "return AttentionFacts, or None for a model without attention."
    )
