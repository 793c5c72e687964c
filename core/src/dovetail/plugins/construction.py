"""Construction: making an object of a plugin's class; its failures are reported as the plugin's.

Contexts carry a plugin's options. Kinds that are made without a context (platform, policy, ops,
linear_method) get them as the keyword `options`, and only where the plugin has an options model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from dovetail.errors import ContractError, DovetailError, PluginLoadError
from dovetail.plugins.containment import describe_failure

if TYPE_CHECKING:
    from dovetail.plugins.registry import PluginRegistry

Options = Mapping[str, object]
T = TypeVar("T")


def call_plugin(whose: str, what: str, question: Callable[[], T]) -> T:
    """Return a plugin's answer to a question of the start; its failure becomes a PluginLoadError.

    whose, what: the plugin and what it is called for, for messages. A DovetailError passes.
    """
    try:
        return question()
    except (DovetailError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise PluginLoadError(
            f"The {whose} failed when it was called for its {what}: {describe_failure(error)}."
        ) from error


def construct(
    kind: str,
    cls: Callable[..., Any],
    context: object = None,
    *,
    options: Mapping[str, object] | None = None,
) -> Any:
    """Return an instance of a plugin's class, made from `context` or, without one, of `options`.

    A DovetailError and Ctrl-C pass; whatever else the constructor raises, `SystemExit` too, becomes
    a PluginLoadError that names kind and class and has it as its cause. Raises ContractError for a
    class that makes an object of another one.
    """
    try:
        arguments = () if context is None else (context,)
        made = cls(*arguments, **({"options": options} if options and context is None else {}))
    except (DovetailError, KeyboardInterrupt):
        raise
    except BaseException as error:
        name = f"{cls.__module__}:{getattr(cls, '__qualname__', cls)}"
        raise PluginLoadError(
            f"The {kind} {name} was loaded, but making it failed: {describe_failure(error)}.\n"
            f"Fix the cause, or choose another plugin in its place."
        ) from error
    if isinstance(cls, type) and not issubclass(type(made), cls):
        raise ContractError(
            f"The {kind} {cls.__module__}:{cls.__qualname__} was loaded, but making it gave an "
            f"object of {type(made).__name__!r}. Its __new__ has to return an instance of it."
        )
    return made


def make_instance(
    plugins: PluginRegistry,
    kind: str,
    reference: str | type,
    context: Callable[[Options], object],
) -> Any:
    """Load `reference` and return an instance of it.

    context: makes the constructor's argument of the plugin's own options.
    Raises PluginError if it cannot be loaded or made, ConfigError for options that are wrong.
    """
    cls = plugins.load(kind, reference)
    return construct(kind, cls, context(plugins.options_of(kind, cls)))


def plugin_name(plugins: PluginRegistry, kind: str, reference: str | type) -> str:
    """Return the name that a plugin goes by in options and messages."""
    return plugins.resolve(kind, reference).name
