"""Looks up the plugins that a configuration names, before any slow import.

An unknown name is reported in milliseconds, before a tensor library and the weights are loaded.
Only metadata is read; a class is checked when it is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.errors import PluginNotFoundError
from dovetail.plugin_kinds import KINDS, NO_PLUGIN, Cardinality, Kind, get_kind
from dovetail.plugins.resolving.reference import reference_text
from dovetail.plugins.selection import AUTO
from dovetail.value_checks import shorten

if TYPE_CHECKING:
    from dovetail.config import EngineConfig, RequestedConfig
    from dovetail.plugins import PluginRegistry

    AnyConfig = RequestedConfig | EngineConfig


def make_registry(config: RequestedConfig) -> PluginRegistry:
    """Return a registry with the plugin rules and the plugin options of `config`."""
    from dovetail.plugins import PluginPolicy, PluginRegistry

    return PluginRegistry(policy=PluginPolicy.of(config.plugins), options=config.plugin_options)


def named_plugins(kind: str, config: AnyConfig) -> tuple[str | type, ...]:
    """Return the references in `config` to plugins of `kind`; ("auto",) to select one."""
    row = get_kind(kind)
    if not row.field or (kind == "tokenizer" and config.model.skip_tokenizer_init):
        return ()
    section, _, name = row.field.partition(".")
    value = getattr(getattr(config, section), name)
    if row.is_automatic and value == NO_PLUGIN:
        return ()
    if value is None or value == "":
        return (AUTO,) if row.cardinality is Cardinality.ONE else ()
    return value if isinstance(value, tuple) else (value,)


def check_plugin_choices(config: RequestedConfig, plugins: PluginRegistry) -> None:
    """Raise a PluginError for the first plugin in `config` that does not exist.

    Raises ConfigError for options of a plugin that does not exist.
    """
    shared = {name for kind in KINDS.values() for name in kind.also_accepts}
    for kind in KINDS.values():
        if kind.option and kind.name not in shared:
            for reference in named_plugins(kind.name, config):
                _check_pick(kind, reference, plugins)
    plugins.check_option_names(_chosen(config, plugins))


def _locates_model(kind: Kind) -> bool:
    """Return whether plugins of this kind locate the model, before a configuration exists."""
    return bool(kind.roles) and not kind.field


def _check_pick(kind: Kind, reference: str | type, plugins: PluginRegistry) -> None:
    if reference == AUTO or any(
        _is_known(also_accept, reference, plugins) for also_accept in kind.also_accepts
    ):
        return
    try:
        plugins.resolve(kind.name, reference)
    except PluginNotFoundError as rejection:
        named = f"{kind.option_text}={shorten(reference_text(reference))}"
        raise PluginNotFoundError(f"{named}: {rejection}") from None


def check_options_are_used(config: EngineConfig, plugins: PluginRegistry) -> None:
    """Raise ConfigError for options of an installed plugin that this engine does not use.

    config: the resolved configuration. A kind without a resolved plugin is checked when its plugin
    is selected.
    """
    chosen: dict[str, list[str | type]] = {
        name: []
        for name, kind in KINDS.items()
        if AUTO not in named_plugins(name, config) and not _locates_model(kind)
    }
    for kind, reference in _chosen(config, plugins):
        chosen[kind].append(reference)
    plugins.check_options_used(chosen)


def _chosen(config: AnyConfig, plugins: PluginRegistry) -> list[tuple[str, str | type]]:
    """Return (kind, reference) of every plugin that `config` names."""
    named = [(kind, named_plugin) for kind in KINDS for named_plugin in named_plugins(kind, config)]
    return [(kind, item) for kind, item in named if item != AUTO and _is_known(kind, item, plugins)]


def _is_known(kind: str, reference: str | type, plugins: PluginRegistry) -> bool:
    try:
        plugins.resolve(kind, reference)
    except PluginNotFoundError:
        return False
    return True
