"""Engine options and their resolution to a configuration.

`EngineArgs` has the user's options. `create_engine_config` checks them, reads the model directory
and returns a `RequestedConfig`; `dovetail.config.resolve` turns it into an `EngineConfig`.
`EngineArgs` needs only the standard library; everything else is imported when it is first used, so
that `from dovetail import LLM` is fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from dovetail.config.engine_args import EngineArgs

if TYPE_CHECKING:
    from dovetail.config.model_directory import (
        ModelDirectory,
        default_sampling_params,
        eos_token_ids,
    )
    from dovetail.interfaces.engine_config import (
        CacheConfig,
        Change,
        ComputeConfig,
        EngineConfig,
        LoadConfig,
        ModelConfig,
        ParallelConfig,
        SchedulerConfig,
    )
    from dovetail.interfaces.requested_config import (
        ExtensionsConfig,
        LimitsConfig,
        ObservabilityConfig,
        PluginsConfig,
        RequestedConfig,
    )

_MODULES = {
    "dovetail.config.model_directory": "ModelDirectory default_sampling_params eos_token_ids",
    "dovetail.interfaces.engine_config": "CacheConfig Change ComputeConfig EngineConfig LoadConfig "
    "ModelConfig ParallelConfig SchedulerConfig",
    "dovetail.interfaces.requested_config": "ExtensionsConfig LimitsConfig ObservabilityConfig "
    "PluginsConfig RequestedConfig",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = [
    "CacheConfig",
    "Change",
    "ComputeConfig",
    "EngineArgs",
    "EngineConfig",
    "ExtensionsConfig",
    "LimitsConfig",
    "LoadConfig",
    "ModelConfig",
    "ModelDirectory",
    "ObservabilityConfig",
    "ParallelConfig",
    "PluginsConfig",
    "RequestedConfig",
    "SchedulerConfig",
    "default_sampling_params",
    "eos_token_ids",
]


def __getattr__(name: str) -> object:
    """Import the public name `name` when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
