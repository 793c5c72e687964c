"""The plugins that a configuration names, looked up before anything heavy is imported.

A wrong name is told in milliseconds, not after a tensor library and the weights are loaded. Looks
at metadata only; whether a class loads and meets its contract shows when it is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dovetail.config.engine_config import shown
from dovetail.config.field_types import reference_name
from dovetail.errors import PluginNotFoundError
from dovetail.plugins.selection import AUTO

if TYPE_CHECKING:
    from dovetail.config import EngineConfig
    from dovetail.plugins import PluginRegistry

_OPTIONS = {
    "platform": "platform",
    "scheduler": "scheduler_cls (scheduling_policy)",
    "executor": "executor_backend (distributed_executor_backend)",
    "worker": "worker_cls",
    "attention": "attention_backend",
    "linear_method": "quantization (linear_method)",
    "ops": "ops",
    "weight_loader": "load_format",
    "tokenizer": "tokenizer_mode",
    "worker_extension": "worker_extension_cls",
    "io_processor": "io_processor",
    "kv_connector": "kv_connector",
    "logits_processor": "logits_processors",
    "step_extension": "step_extensions",
    "grammar": "grammar_backend",
    "stat_logger": "stat_loggers",
    "hooks": "hooks",
}
"""What users call the option that names a plugin of a kind, and its other name."""


def make_registry(config: EngineConfig) -> PluginRegistry:
    """Return a registry under the rules, and with the options, that `config` has for plugins."""
    from dovetail.plugins import PluginRegistry

    return PluginRegistry(policy=config.plugins.policy(), options=config.plugin_options)


def check_plugin_choices(config: EngineConfig, plugins: PluginRegistry) -> None:
    """Raise a PluginError for the first plugin that `config` names and that is not to be found."""
    for kind, reference in _picks(config):
        if reference == AUTO:
            continue
        try:
            plugins.resolve(kind, reference)
        except PluginNotFoundError as refusal:
            # `scheduler_cls` takes a policy, too; the message stays that of a scheduler.
            if kind != "scheduler" or not _is_policy(reference, plugins):
                asked = f"{_OPTIONS[kind]}={shown(reference_name(reference))}"
                raise PluginNotFoundError(f"{asked}: {refusal}") from None
    plugins.check_option_names(_chosen(config, plugins))


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
    extensions = config.extensions
    if extensions.worker_extension_cls is not None:
        yield "worker_extension", extensions.worker_extension_cls
    if extensions.io_processor is not None:
        yield "io_processor", extensions.io_processor
    if extensions.kv_connector is not None:
        yield "kv_connector", extensions.kv_connector
    if extensions.grammar_backend is not None:
        yield "grammar", extensions.grammar_backend
    yield from (("logits_processor", one) for one in extensions.logits_processors)
    yield from (("step_extension", one) for one in extensions.step_extensions)
    yield from (("stat_logger", one) for one in extensions.stat_loggers)
    yield from (("hooks", one) for one in extensions.hooks)


def _chosen(config: EngineConfig, plugins: PluginRegistry) -> Iterator[tuple[str, str | type]]:
    for kind, reference in _picks(config):
        if kind == "scheduler" and reference != AUTO and _is_policy(reference, plugins):
            yield "policy", reference
        elif reference != AUTO:
            yield kind, reference


def _is_policy(reference: str | type, plugins: PluginRegistry) -> bool:
    try:
        plugins.resolve("policy", reference)
    except PluginNotFoundError:
        return False
    return True
