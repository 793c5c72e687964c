"""Creates instances of plugin classes, and reports failures with the name of the plugin.

Contexts contain the options of a plugin. Kinds without a context (platform, policy, ops,
linear_method) get them as the keyword `options`, but only if the plugin has an options model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from dovetail.errors import ContractError, DovetailError, PluginLoadError
from dovetail.plugins.containment import describe_failure

if TYPE_CHECKING:
    from dovetail.plugins.registry import PluginRegistry

Options = Mapping[str, object]
T = TypeVar("T")


def call_plugin(owner: str, what: str, question: Callable[[], T]) -> T:
    """Call a method of a plugin during engine startup. Convert its exceptions to PluginLoadError.

    owner, what: the plugin and the purpose of the call, for messages. A DovetailError is raised
    unchanged.
    """
    try:
        return question()
    except (DovetailError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise PluginLoadError(
            f"The {owner} failed when the engine called it for its {what}: "
            f"{describe_failure(error)}."
        ) from error


def call_plugin_within(
    owner: str, what: str, question: Callable[[], object], *, timeout_s: float
) -> None:
    """Call a method of a plugin in a thread, and wait at most `timeout_s` seconds.

    Raises PluginLoadError if the method has not returned by then; it continues in its thread. Also
    raises the errors of `call_plugin`.
    """
    errors: list[BaseException] = []

    def call() -> None:
        try:
            call_plugin(owner, what, question)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, name=f"dovetail-{what}", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise PluginLoadError(f"The {what} of the {owner} was skipped: {error}.") from error
    thread.join(timeout_s)
    if thread.is_alive():
        raise PluginLoadError(
            f"The {what} of the {owner} did not finish within {timeout_s:g} s and continues in the "
            "background."
        )
    if errors:
        raise errors[0]


def construct(
    kind: str,
    cls: Callable[..., Any],
    context: object = None,
    *,
    options: Mapping[str, object] | None = None,
) -> Any:
    """Return an instance of a plugin's class, constructed with `context` or with `options`.

    A DovetailError and Ctrl-C are raised unchanged. Any other exception of the constructor,
    `SystemExit` too, becomes the cause of a PluginLoadError with kind and class. Raises
    ContractError if the constructor returns an object of another class.
    """
    try:
        arguments = () if context is None else (context,)
        instance = cls(*arguments, **({"options": options} if options and context is None else {}))
    except (DovetailError, KeyboardInterrupt):
        raise
    except BaseException as error:
        name = f"{cls.__module__}:{getattr(cls, '__qualname__', cls)}"
        raise PluginLoadError(
            f"The {kind} {name} was loaded, but its constructor failed: "
            f"{describe_failure(error)}.\n"
            f"Fix the cause, or choose another plugin."
        ) from error
    if isinstance(cls, type) and not issubclass(type(instance), cls):
        raise ContractError(
            f"The {kind} {cls.__module__}:{cls.__qualname__} was loaded, but its constructor "
            "returned an "
            f"object of {type(instance).__name__!r}. __new__ must return an instance of the class."
        )
    return instance


def make_instance(
    plugins: PluginRegistry,
    kind: str,
    reference: str | type,
    context: Callable[[Options], object],
) -> Any:
    """Load `reference` and return an instance of it.

    context: returns the constructor's argument for the options of the plugin.
    Raises PluginError if it cannot be loaded or constructed, ConfigError for invalid options.
    """
    cls = plugins.load(kind, reference)
    return construct(kind, cls, context(plugins.options_of(kind, cls)))


def plugin_name(plugins: PluginRegistry, kind: str, reference: str | type) -> str:
    """Return the name of a plugin, as used in options and messages."""
    return plugins.resolve(kind, reference).name
