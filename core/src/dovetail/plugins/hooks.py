"""Checks and calls the hooks plugins that the user enabled.

pluggy compares the methods of each plugin with `HookSpecs`. This module makes the calls, so that an
error names its plugin and does not affect other plugins. Code that calls a hook in a loop should
call `subscribers` once and keep the result.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pluggy

from dovetail.errors import ConfigError, ContractError, PluginError, nearest
from dovetail.interfaces.hooks import PROJECT, HooksContext, HookSpecs
from dovetail.plugins.construction import make_instance, plugin_name
from dovetail.plugins.registry import PluginRegistry

logger = logging.getLogger(__name__)

HOOK_NAMES = tuple(name for name in vars(HookSpecs) if not name.startswith("_"))
"""The names of all hooks."""

_PREFIXES = ("on_", "register_")


@dataclass(frozen=True, kw_only=True)
class Subscriber:
    """One plugin's implementation of one hook. call: takes the hook's parameters, by name."""

    plugin: str
    hook: str
    call: Callable[..., Any]


class _Manager(pluggy.PluginManager):
    """A pluggy manager that treats any method with the name of a hook as a hook, marked or not."""

    def parse_hookimpl_opts(self, plugin: object, name: str) -> pluggy.HookimplOpts | None:
        """Return the options of a method that is a hook, or None for any other attribute."""
        if name not in HOOK_NAMES or getattr(type(plugin), name, None) is vars(HookSpecs)[name]:
            return None
        return super().parse_hookimpl_opts(plugin, name) or {
            "wrapper": False,
            "hookwrapper": False,
            "optionalhook": False,
            "tryfirst": False,
            "trylast": False,
            "specname": None,
        }


class HookPlugins:
    """The enabled hooks plugins of one engine or command line, in the order of the option."""

    def __init__(self, plugins: Mapping[str, object]) -> None:
        """Register `plugins`, which are given by name.

        Raises ContractError if a plugin defines an unknown or an async hook, or a hook with wrong
        parameters.
        """
        self._manager = _Manager(PROJECT)
        self._manager.add_hookspecs(HookSpecs)
        # pluggy calls the plugin that was registered last first.
        for name, plugin in reversed(list(plugins.items())):
            _check_names(name, plugin)
            try:
                self._manager.register(plugin, name)
            except pluggy.PluginValidationError as error:
                output = str(error).replace("\n", " ")
                raise ContractError(
                    f"The hooks plugin {name!r} has an incompatible hook: {output}"
                ) from None

    def subscribers(self, hook: str) -> tuple[Subscriber, ...]:
        """Return the implementations of `hook`, in the order of the calls."""
        implementations = getattr(self._manager.hook, hook).get_hookimpls()
        return tuple(
            _subscriber(hook, implementation) for implementation in reversed(implementations)
        )

    def notify(self, hook: str, **values: object) -> None:
        """Call all implementations. Raise PluginError, naming the plugin, at the first failure."""
        for subscriber in self.subscribers(hook):
            try:
                subscriber.call(**values)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                raise PluginError(
                    f"{failure(subscriber, error)}. Remove the plugin from the option hooks."
                ) from error

    def notify_all(self, hook: str, **values: object) -> None:
        """Call all implementations. Log a warning for each that raises."""
        for subscriber in self.subscribers(hook):
            try:
                subscriber.call(**values)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                logger.warning("%s.", failure(subscriber, error))


def load_hooks(references: Sequence[str | type], plugins: PluginRegistry) -> HookPlugins:
    """Load, construct and check the hooks plugins of the option. Raise PluginError on failure."""
    created: dict[str, object] = {}
    for reference in references:
        name = plugin_name(plugins, "hooks", reference)
        if name in created:
            raise ConfigError(f"The option hooks contains {name!r} twice; list it once.")
        created[name] = make_instance(
            plugins, "hooks", reference, lambda own: HooksContext(options=own)
        )
    return HookPlugins(created)


def failure(subscriber: Subscriber, error: BaseException) -> str:
    """Return a message, without a final period, about the failure of a subscriber."""
    cause = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"The hooks plugin {subscriber.plugin!r} failed in {subscriber.hook}: {cause}"


def _check_names(plugin_name: str, plugin: object) -> None:
    """Raise ContractError for an async hook, or a method with a hook prefix that is not a hook."""
    for name in dir(type(plugin)):
        if name.startswith(_PREFIXES) and name not in HOOK_NAMES:
            raise ContractError(
                f"The hooks plugin {plugin_name!r} defines {name!r}, which is not a hook."
                f"{nearest(name, HOOK_NAMES)} Hooks: {', '.join(HOOK_NAMES)}."
            )
        if name in HOOK_NAMES and inspect.iscoroutinefunction(getattr(plugin, name)):
            raise ContractError(
                f"The hooks plugin {plugin_name!r} defines {name!r} as async; hooks cannot be "
                "coroutines: define a plain method."
            )


def _subscriber(hook: str, implementation: pluggy.HookImpl) -> Subscriber:
    if implementation.wrapper or implementation.hookwrapper:
        raise ContractError(
            f"The hooks plugin {implementation.plugin_name!r} wraps {hook}; pluggy wrappers are "
            "not "
            "supported: define a plain method."
        )
    function, names = implementation.function, implementation.argnames
    specified = list(inspect.signature(getattr(HookSpecs, hook)).parameters)[1:]
    if list(names) != specified:

        def call(**values: object) -> object:
            return function(*(values[name] for name in names))

        return Subscriber(plugin=implementation.plugin_name, hook=hook, call=call)
    return Subscriber(plugin=implementation.plugin_name, hook=hook, call=function)
