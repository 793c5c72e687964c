"""Loads the model class of a configuration by the architecture in config.json."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dovetail.errors import PluginNotFoundError

if TYPE_CHECKING:
    from dovetail.interfaces.engine_config import WorkerConfig
    from dovetail.plugins.registry import PluginRegistry


def load_architecture(plugins: PluginRegistry, config: WorkerConfig) -> type[Any]:
    """Return the class of the model's architecture. Raise the errors of `PluginRegistry.load`.

    An unknown architecture is a PluginNotFoundError that names the file.
    """
    name = config.model.architecture
    try:
        plugins.resolve("model", name)
    except PluginNotFoundError as rejection:
        path = config.model.model_dir / "config.json"
        raise PluginNotFoundError(f"{path} names {name!r}. {rejection}") from None
    return plugins.load("model", name)
