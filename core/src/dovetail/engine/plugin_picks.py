"""The plugins that a configuration names, looked up before anything heavy is imported.

A wrong name is told in milliseconds, not after a tensor library and the weights are loaded. Looks
at metadata only; whether a class loads and meets its contract shows when it is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dovetail.errors import PluginNotFoundError
from dovetail.plugins.selection import AUTO

if TYPE_CHECKING:
    from dovetail.config import EngineConfig
    from dovetail.plugins import PluginRegistry


def check_picks(config: EngineConfig, plugins: PluginRegistry) -> None:
    """Raise a PluginError for the first plugin that `config` names and that is not to be found."""
    for kind, reference in _picks(config):
        if reference == AUTO:
            continue
        try:
            plugins.resolve(kind, reference)
        except PluginNotFoundError as refusal:
            # `scheduler_cls` takes a policy, too; the message stays that of a scheduler.
            if kind != "scheduler" or not _is_policy(reference, plugins):
                raise refusal from None


def _picks(config: EngineConfig) -> Iterator[tuple[str, str | type]]:
    """Yield (kind, reference) of every field that names a plugin."""
    yield "platform", config.parallel.platform
    yield "scheduler", config.scheduler.scheduler_cls
    yield "executor", config.parallel.executor_backend
    yield "worker", config.parallel.worker_cls
    yield "attention", config.compute.attention_backend
    yield "linear_method", config.compute.linear_method
    yield "ops", config.compute.ops
    yield "weight_loader", config.load.load_format
    if not config.model.skip_tokenizer_init:
        yield "tokenizer", config.model.tokenizer_mode


def _is_policy(reference: str | type, plugins: PluginRegistry) -> bool:
    try:
        plugins.resolve("policy", reference)
    except PluginNotFoundError:
        return False
    return True
