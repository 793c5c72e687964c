"""What an engine is asked to be: flat options, the checked tree made from them, a model directory.

`EngineArgs` is at hand with the import and needs the standard library only. Everything else is
imported when it is first named, so that `from dovetail import LLM` stays light. Knows no plugin:
names of plugins are carried as they were given.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from dovetail.config.engine_args import EngineArgs

if TYPE_CHECKING:
    from dovetail.config.engine_config import (
        CacheConfig,
        Change,
        ComputeConfig,
        EngineConfig,
        ExtensionsConfig,
        LimitsConfig,
        LoadConfig,
        ModelConfig,
        ObservabilityConfig,
        ParallelConfig,
        PluginsConfig,
        SchedulerConfig,
    )
    from dovetail.config.model_directory import (
        ModelDirectory,
        default_sampling_params,
        eos_token_ids,
    )

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
    "SchedulerConfig",
    "default_sampling_params",
    "eos_token_ids",
]

_IN_MODEL_DIRECTORY = {"ModelDirectory", "default_sampling_params", "eos_token_ids"}


def __getattr__(name: str) -> object:
    """Import the public name `name` when it is first asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "model_directory" if name in _IN_MODEL_DIRECTORY else "engine_config"
    value: object = getattr(import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value
