"""The plugins that a configuration names, looked up before anything heavy is imported.

A wrong name is told in milliseconds, not after a tensor library and the weights are loaded. Looks
at metadata only; whether a class loads and meets its contract shows when it is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dovetail.errors import PluginNotFoundError
from dovetail.interfaces.config_fields import reference_name
from dovetail.plugins.selection import AUTO
from dovetail.value_checks import shorten

if TYPE_CHECKING:
    from dovetail.config import RequestedConfig
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


def make_registry(config: RequestedConfig) -> PluginRegistry:
    """Return a registry under the rules, and with the options, that `config` has for plugins."""
    from dovetail.plugins import PluginRegistry
    from dovetail.plugins.plugin_policy import PluginPolicy

    return PluginRegistry(policy=PluginPolicy.of(config.plugins), options=config.plugin_options)


def check_plugin_choices(config: RequestedConfig, plugins: PluginRegistry) -> None:
    """Raise a PluginError for the first plugin that `config` names and that is not to be found."""
    for kind, reference in _picks(config):
        if reference == AUTO:
            continue
        try:
            plugins.resolve(kind, reference)
        except PluginNotFoundError as refusal:
            # `scheduler_cls` takes a policy, too; the message stays that of a scheduler.
            if kind != "scheduler" or not _is_policy(reference, plugins):
                asked = f"{_OPTIONS[kind]}={shorten(reference_name(reference))}"
                raise PluginNotFoundError(f"{asked}: {refusal}") from None
    plugins.check_option_names(_chosen(config, plugins))


def _picks(config: RequestedConfig) -> Iterator[tuple[str, str | type]]:
    """Yield (kind, reference) of every field that names a plugin."""
    yield "platform", config.parallel.platform
    yield "scheduler", config.scheduler.scheduler_cls
    yield "executor", config.parallel.executor_backend
    yield "worker", config.parallel.worker_cls or AUTO
    yield "attention", config.compute.attention_backend or AUTO
    yield "linear_method", config.compute.linear_method or AUTO
    yield "ops", config.compute.ops or AUTO
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


def _chosen(config: RequestedConfig, plugins: PluginRegistry) -> Iterator[tuple[str, str | type]]:
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
