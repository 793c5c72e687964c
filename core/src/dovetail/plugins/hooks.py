"""Hooks: the plugins that a user enabled to be told what happens, checked and called.

pluggy holds each plugin's methods against `HookSpecs`; the calls are our own, so that an error has
its plugin's name and one plugin's error harms no other. Only what is subscribed is ever called:
whoever calls in a loop takes `subscribers` once and keeps them.
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
"""The hooks that there are."""

_PREFIXES = ("on_", "register_")


@dataclass(frozen=True, kw_only=True)
class Subscriber:
    """One plugin's implementation of one hook. call: takes the hook's parameters, by name."""

    plugin: str
    hook: str
    call: Callable[..., Any]


class _Manager(pluggy.PluginManager):
    """Takes every method that has the name of a hook, marked or not."""

    def parse_hookimpl_opts(self, plugin: object, name: str) -> pluggy.HookimplOpts | None:
        """Return the options of a method that is a hook; None for any other attribute."""
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
    """The enabled plugins of one engine or command line, in the order in which they were named."""

    def __init__(self, plugins: Mapping[str, object]) -> None:
        """plugins: by name. Raise ContractError for methods that no hook can be called with."""
        self._manager = _Manager(PROJECT)
        self._manager.add_hookspecs(HookSpecs)
        # pluggy calls the latest first.
        for name, plugin in reversed(list(plugins.items())):
            _check_names(name, plugin)
            try:
                self._manager.register(plugin, name)
            except pluggy.PluginValidationError as error:
                said = str(error).replace("\n", " ")
                raise ContractError(
                    f"The hooks plugin {name!r} has an unfit hook: {said}"
                ) from None

    def subscribers(self, hook: str) -> tuple[Subscriber, ...]:
        """Return who wants to be notified of `hook`, in the order of the calls."""
        found = getattr(self._manager.hook, hook).get_hookimpls()
        return tuple(_subscriber(hook, implementation) for implementation in reversed(found))

    def notify(self, hook: str, **values: object) -> None:
        """Call everybody; raise PluginError, naming the plugin, for the first that raises."""
        for subscriber in self.subscribers(hook):
            try:
                subscriber.call(**values)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                raise PluginError(
                    f"{failure(subscriber, error)}. Leave it out of hooks."
                ) from error

    def notify_all(self, hook: str, **values: object) -> None:
        """Call everybody; what one raises is a warning, and the others are called."""
        for subscriber in self.subscribers(hook):
            try:
                subscriber.call(**values)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                logger.warning("%s.", failure(subscriber, error))


def load_hooks(references: Sequence[str | type], plugins: PluginRegistry) -> HookPlugins:
    """Load, make and check the hooks that a user named; raise PluginError for what is unfit."""
    made: dict[str, object] = {}
    for reference in references:
        name = plugin_name(plugins, "hooks", reference)
        if name in made:
            raise ConfigError(f"hooks names {name!r} twice; name it once.")
        made[name] = make_instance(
            plugins, "hooks", reference, lambda own: HooksContext(options=own)
        )
    return HookPlugins(made)


def failure(subscriber: Subscriber, error: BaseException) -> str:
    """Return, as a sentence without its full stop, that a subscriber raised."""
    cause = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"The hooks plugin {subscriber.plugin!r} failed in {subscriber.hook}: {cause}"


def _check_names(plugin_name: str, plugin: object) -> None:
    """Raise ContractError for a method that looks like a hook and would never be called."""
    for name in dir(type(plugin)):
        if name.startswith(_PREFIXES) and name not in HOOK_NAMES:
            raise ContractError(
                f"The hooks plugin {plugin_name!r} defines {name!r}, which is not a hook."
                f"{nearest(name, HOOK_NAMES)} Hooks: {', '.join(HOOK_NAMES)}."
            )
        if name in HOOK_NAMES and inspect.iscoroutinefunction(getattr(plugin, name)):
            raise ContractError(
                f"The hooks plugin {plugin_name!r} defines {name!r} as async; hooks are called, "
                "not awaited: write a plain method."
            )


def _subscriber(hook: str, implementation: pluggy.HookImpl) -> Subscriber:
    if implementation.wrapper or implementation.hookwrapper:
        raise ContractError(
            f"The hooks plugin {implementation.plugin_name!r} wraps {hook}; hooks are told, they "
            "do not surround each other: write a plain method."
        )
    function, wanted = implementation.function, implementation.argnames
    specified = list(inspect.signature(getattr(HookSpecs, hook)).parameters)[1:]
    if list(wanted) != specified:

        def call(**values: object) -> object:
            return function(*(values[name] for name in wanted))

        return Subscriber(plugin=implementation.plugin_name, hook=hook, call=call)
    return Subscriber(plugin=implementation.plugin_name, hook=hook, call=function)
