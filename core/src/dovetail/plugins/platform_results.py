"""Checks the return values of platforms, because a plugin may raise or return anything.

All calls for a platform's names, capabilities or preferences are in this module, so that an invalid
value raises a ContractError with the name of the platform.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dovetail.errors import ContractError, PluginError
from dovetail.interfaces.platform import Platform, PlatformInfo
from dovetail.plugins.construction import call_plugin
from dovetail.plugins.resolving.reference import parse_reference
from dovetail.value_checks import shorten

MAX_PREFERRED = 100


def check_info(platform_cls: type[Platform]) -> PlatformInfo:
    """Return the info of a platform. Raise ContractError for invalid info, rank or `automatic`."""
    info: object = getattr(platform_cls, "info", None)
    reference = f"{platform_cls.__module__}:{platform_cls.__qualname__}"
    if not isinstance(info, PlatformInfo):
        raise ContractError(
            f"The platform {reference} has info = {shorten(info)}; it must be a PlatformInfo."
        )
    for field in ("name", "device_type"):
        value: object = getattr(info, field)
        if not isinstance(value, str) or not value or not value.isprintable():
            raise ContractError(
                f"The platform {reference} has info.{field} = {shorten(value)}; it must be a "
                "string."
            )
    if type(platform_cls.rank) is not int:
        raise ContractError(
            f"The platform {reference} has rank = {shorten(platform_cls.rank)}; it must be an int."
        )
    if type(platform_cls.automatic) is not bool:
        raise ContractError(
            f"The platform {reference} has automatic = {shorten(platform_cls.automatic)}; it must "
            "be a bool."
        )
    return info


def preferred_names(platform: Platform, kind: str) -> tuple[str, ...]:
    """Return the plugins of `kind` that a platform prefers, best first.

    Raises ContractError for anything but a list or tuple of references.
    """
    names: object = _ask(platform, f"preferred {kind} plugins", lambda: platform.prefer(kind))
    if type(names) not in (list, tuple) or len(names) > MAX_PREFERRED:  # type: ignore[arg-type]
        due = f"a tuple of plugin names, at most {MAX_PREFERRED}"
        raise _wrong(platform, f"prefer({kind!r})", names, due)
    assert isinstance(names, (list, tuple))
    for item in names:
        try:
            if not isinstance(item, str):
                raise _wrong(platform, f"prefer({kind!r})", names, "a tuple of plugin names")
            parse_reference(item)
        except ContractError:
            raise
        except PluginError as error:
            text = f"a tuple of plugin names; {str(error).rstrip('.')}"
            raise _wrong(platform, f"prefer({kind!r})", names, text) from None
    return tuple(names)


def provided_capabilities(platform: Platform) -> frozenset[str]:
    """Return the capability ids of a platform. Raise ContractError if they are not a set of str."""
    capabilities: object = _ask(platform, "capabilities", platform.capabilities)
    if not isinstance(capabilities, (set, frozenset)) or not all(
        isinstance(item, str) for item in capabilities
    ):
        raise _wrong(platform, "capabilities()", capabilities, "a frozenset of capability ids")
    return frozenset(capabilities)


def check_problems(platform: Platform, problems: object) -> Sequence[str]:
    """Return the result of `problems`. Raise ContractError if it is not a list of sentences."""
    is_list = isinstance(problems, (list, tuple))
    if not is_list or not all(isinstance(x, str) for x in problems):  # type: ignore[attr-defined]
        raise _wrong(platform, "problems(config)", problems, "a tuple of sentences")
    return problems  # type: ignore[return-value]


def _ask(platform: Platform, what: str, question: Callable[[], object]) -> object:
    return call_plugin(f"platform {platform.info.name!r}", what, question)


def _wrong(platform: Platform, what: str, value: object, due: str) -> ContractError:
    return ContractError(
        f"The platform {platform.info.name!r} returned {shorten(value)} for {what}; it must "
        f"return {due}."
    )
