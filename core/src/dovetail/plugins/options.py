"""Checks the options of plugins, `plugin_options={"name": {…}}`, with each plugin's model.

A plugin names a pydantic model in its manifest (`options`) or on its class (`options_model`).
Unknown keys are always rejected, even if the model allows them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dovetail.errors import ConfigError, ContractError, nearest
from dovetail.interfaces.frozen_mapping import FrozenDict, freeze
from dovetail.plugin_kinds import get_kind
from dovetail.plugins.metadata.description import Description
from dovetail.retired_names import renamed_hint
from dovetail.value_checks import shorten

_NONE: Mapping[str, Any] = FrozenDict()


class PluginOptions:
    """The user's options of plugins.

    given: options by plugin name, by "kind:name" if several kinds have that name, or by class path.
    """

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        try:
            self._given: Mapping[str, Any] = freeze(options or {})
        except RecursionError:
            raise ConfigError(
                "plugin_options: the options are nested too deeply; use fewer levels of lists and "
                "mappings."
            ) from None

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys in `plugin_options`."""
        return tuple(self._given)

    def check_names(self, known: Iterable[str], kinds_of: Mapping[str, list[str]]) -> None:
        """Raise ConfigError for options of a plugin that is neither installed nor chosen.

        known: valid names of plugins. kinds_of: maps a name to the kinds whose plugin takes
        options.
        """
        names = set(known)
        for key, value in self._given.items():
            if key not in names:
                raise ConfigError(
                    f"plugin_options: there is no plugin {shorten(key)}.{nearest(key, names)} "
                    "Use a plugin's name, 'kind:name', or the class path as it was requested."
                )
            if not isinstance(value, Mapping):
                raise ConfigError(
                    f"plugin_options: {shorten(key)} is {shorten(value)}; write its options as a "
                    "mapping."
                )
            for option in value:
                if not isinstance(option, str):
                    raise ConfigError(
                        f"plugin_options: {shorten(key)} has the option {shorten(option)}, which "
                        "is not a string; options are named by strings."
                    )
            if len(kinds := kinds_of.get(key, [])) > 1:
                choices = " or ".join(f"'{kind}:{key}'" for kind in kinds)
                raise ConfigError(
                    f"plugin_options: plugins of several kinds are called {key!r} and take "
                    f"options; write {choices}."
                )

    def validate(
        self, description: Description, model: object, *, shared: bool
    ) -> Mapping[str, Any]:
        """Return the frozen options of a plugin, including the defaults of its model.

        model: None for a plugin without a model. Such a plugin takes no options, except a plugin
        without a manifest whose constructor takes a context: it gets its options unchecked.
        shared: whether the name may also mean a plugin of another kind. Raises ConfigError with
        plugin, option and remedy if an option is not valid, ContractError if the model is not.
        """
        key = self._key(description)
        options: Mapping[str, Any] = self._given.get(key, _NONE)
        if model is not None:
            return _validated(options, model, description)
        if shared and key == description.name:
            return _NONE
        if options and (description.in_manifest or not get_kind(description.kind).takes_context):
            raise ConfigError(
                f"plugin_options: the {description} takes no options, but {shorten(dict(options))} "
                f"were given. Remove {key!r} from plugin_options."
            )
        return options

    def _key(self, description: Description) -> str:
        """Return the key of a plugin's options, or "" if the user set none."""
        keys = [key for key in description.keys if key in self._given]
        if len(keys) > 1:
            raise ConfigError(
                f"plugin_options: {' and '.join(map(repr, keys))} name the same plugin; use only "
                "one key."
            )
        return keys[0] if keys else ""


def unused_options(kind: str, key: str, used: Sequence[str]) -> ConfigError:
    """Return the error for options of an installed plugin that is not used."""
    option = get_kind(kind).option
    instead = (
        f"the {kind} in use is {' and '.join(map(repr, used))}"
        if used
        else f"no {kind} plugin is in use"
    )
    remedy = f"Remove {key!r} from plugin_options"
    if option:
        remedy = f"{remedy}, or select the plugin with {option}"
    return ConfigError(f"plugin_options: {key!r} has options, but {instead}. {remedy}.")


def _validated(options: Any, model: Any, description: Description) -> Mapping[str, Any]:
    from pydantic import BaseModel, ValidationError  # listing plugins does not need pydantic

    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        raise ContractError(
            f"The {description} names {model!r} as its options model, but this is not a pydantic "
            "model. "
            "Name a subclass of pydantic.BaseModel with extra='forbid'."
        )
    fields = model.model_fields
    known = [*fields, *(f.alias for f in fields.values() if f.alias)]
    for key in options:
        if key not in known:
            hint = renamed_hint(key, getattr(model, "retired_options", {})) or nearest(key, known)
            raise ConfigError(
                f"plugin_options: the {description} has no option {shorten(key)}.{hint} "
                f"Options: {', '.join(fields) or 'none'}."
            )
    try:
        checked = model.model_validate(dict(options))
    except ValidationError as error:
        lines = [
            f"{'.'.join(map(str, item['loc']))}={shorten(item['input'])}: {item['msg']}"
            for item in error.errors(include_url=False)
        ]
        raise ConfigError(
            f"plugin_options: options of the {description} are invalid. {'; '.join(lines)}."
        ) from None
    values: Mapping[str, Any] = freeze({name: getattr(checked, name) for name in fields})
    return values
