"""Adapters for plugins that implement an earlier contract version.

An adapter takes the plugin's class and returns a class that meets the current contract. The table
is part of the core and is extended when a contract changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from dovetail.errors import ContractError
from dovetail.plugins.contracts.api_range import ApiRange, parse_range, parse_version
from dovetail.plugins.contracts.checks import contract_version, is_compatible

Adapter = Callable[[type[Any]], type[Any]]
"""Converts a class of an earlier contract version to one of the current version."""

Adapters = Mapping[tuple[str, str], Adapter]
"""Adapters by (kind, earlier version)."""

ADAPTERS: Adapters = MappingProxyType({})
"""The adapters of the core: none yet, because all contracts are 0.x."""


def check_api(kind: str, api: str, owner: str, adapters: Adapters) -> str:
    """Return the earlier contract version to adapt, or "" if the plugin supports the current one.

    api: the range of versions that the plugin supports, or "" for any. Raises ContractError if it
    excludes the current version and there is no adapter.
    """
    current = contract_version(kind)
    now = parse_version(current)
    if not api or now is None or parse_range(api).allows(now):
        return ""
    older = _adaptable(kind, parse_range(api), adapters)
    if older:
        return older
    known = ", ".join(version for its_kind, version in adapters if its_kind == kind) or "none"
    raise ContractError(
        f"The {owner} requires version {api} of the {kind} contract; this core has {current} "
        f"(and adapters for: {known}).\nInstall a version of the plugin for {current}, or another "
        "version of the core."
    )


def adapt(kind: str, loaded: object, version: str, adapters: Adapters) -> tuple[object, str]:
    """Return the class to use, and a note if it was adapted, else "".

    version: the result of `check_api`. A class that declares an earlier version with an adapter is
    adapted too. Raises ContractError if an adapter does not return a class.
    """
    declared = str(getattr(loaded, "CONTRACT_VERSION", ""))
    earlier, now = parse_version(declared), parse_version(contract_version(kind))
    if not version and earlier and now and not is_compatible(earlier, now):
        version = declared if (kind, declared) in adapters else ""
    if not version or not isinstance(loaded, type):
        return loaded, ""
    adapted = adapters[kind, version](loaded)
    if not isinstance(adapted, type):
        raise ContractError(
            f"The adapter of {kind} {version} returned a {type(adapted).__name__!r} object for "
            f"{loaded.__qualname__}; an adapter must return a class."
        )
    return (
        adapted,
        f"{loaded.__qualname__} implements the {kind} contract {version} and is used with an "
        "adapter.",
    )


def _adaptable(kind: str, api: ApiRange, adapters: Adapters) -> str:
    """Return the latest version that `api` allows and that has an adapter, or "" for none."""
    versions = [(parse_version(text), text) for its_kind, text in adapters if its_kind == kind]
    fit = [(version, text) for version, text in versions if version and api.allows(version)]
    return max(fit)[1] if fit else ""
