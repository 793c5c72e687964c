"""Admission: all checks of a resolved plugin before its class is used.

In order: its manifest, the contract version, its needs, the import, the contract, its capability
claims, its options. Only this module calls `loading`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from dovetail.clock import Clock
from dovetail.errors import ContractError, DovetailError, PluginError, PluginLoadError, nearest
from dovetail.interfaces.platform import Probe
from dovetail.plugins.capabilities import (
    CORE_CAPABILITIES,
    DEVICE_PREFIX,
    check_claims,
    declared_ids,
)
from dovetail.plugins.containment import contained, describe_failure
from dovetail.plugins.contracts.adapters import Adapters, adapt, check_api
from dovetail.plugins.contracts.checks import check_contract
from dovetail.plugins.loading import Origin, find_attribute, load_dotted, load_file, load_target
from dovetail.plugins.metadata.description import Description
from dovetail.plugins.metadata.first_party import top_package
from dovetail.plugins.options import PluginOptions
from dovetail.plugins.resolving.reference import FileReference, QualifiedReference, parse_reference
from dovetail.plugins.resolving.resolution import Resolution
from dovetail.value_checks import shorten


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """A loaded and checked plugin. provides, needs: capability ids."""

    cls: type[Any]
    resolution: Resolution
    description: Description
    provides: frozenset[str]
    needs: frozenset[str]


class Admission:
    """Loads and checks resolved plugins.

    adapters: adapters for plugins of earlier contract versions. options: the user's options of
    plugins.
    """

    def __init__(self, *, clock: Clock, adapters: Adapters, options: PluginOptions) -> None:
        self._clock = clock
        self._adapters = adapters
        self._options = options
        self._files: dict[Path, ModuleType] = {}

    def admit(
        self, resolution: Resolution, reference: str | type, about: Description, *, shared: bool
    ) -> Plugin:
        """Import and check one plugin. Raise the errors of `PluginRegistry.load`.

        shared: whether plugins of other kinds have the same name and take options. Every exception
        of the class or its options model during the checks, `SystemExit` too, becomes a
        PluginLoadError.
        """
        try:
            return self._admit(resolution, reference, about, shared=shared)
        except (DovetailError, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise PluginLoadError(
                f"The {about} was imported, but checking it failed: {describe_failure(error)}.\n"
                "Fix the cause, or select another plugin."
            ) from error

    def _admit(
        self, resolution: Resolution, reference: str | type, about: Description, *, shared: bool
    ) -> Plugin:
        owner, kind = str(about), about.kind
        earlier = check_api(kind, about.entry.api, owner, self._adapters)
        loaded: object = reference
        notes = list(resolution.notes)
        if isinstance(reference, str):
            loaded, target, import_notes = self._import(resolution, reference)
            resolution = replace(resolution, target=target)
            notes += import_notes
        loaded, adapted = adapt(kind, loaded, earlier, self._adapters)
        notes += [adapted] if adapted else []
        notes += check_contract(kind, loaded)
        cls = cast("type[Any]", loaded)
        provides = about.entry.provides | declared_ids(cls, "provides")
        check_claims(kind, cls, provides)
        model = self._options_model(about, cls)
        options = self._options.validate(about, model, shared=shared)
        roles = tuple(sorted(about.entry.roles)) if about.in_manifest else ()
        return Plugin(
            cls=cls,
            resolution=replace(resolution, notes=tuple(notes), options=options, roles=roles),
            description=about,
            provides=provides,
            needs=about.entry.needs | declared_ids(cls, "needs"),
        )

    def probe(self, about: Description) -> Probe:
        """Run the probe of a manifest. A plugin without a probe is usable.

        Raises PluginLoadError if the probe cannot be imported or raises, ContractError if it does
        not return a Probe.
        """
        if not about.entry.probe:
            return Probe(usable=True)
        function: Any = self._named(about.entry.probe, about)
        try:
            result = function()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise probe_failure(str(about), error) from error
        return check_probe(str(about), result)

    def _options_model(self, about: Description, cls: type[Any]) -> object:
        if about.entry.options:
            return self._named(about.entry.options, about)
        return getattr(cls, "options_model", None)

    def _named(self, target: str, about: Description) -> object:
        """Import an object that a manifest names."""
        origin = Origin(reference=about.name, distribution=f"{about.distribution} {about.version}")
        with contained(top_package(target), self._clock):
            return load_target(target, origin)

    def _import(self, resolution: Resolution, text: str) -> tuple[object, str, list[str]]:
        """Return the object of a resolution, its exact target, and notes on the import."""
        owner = f"{resolution.distribution} {resolution.version}".strip()
        origin = Origin(reference=text, distribution=owner)
        parsed = parse_reference(text)
        if isinstance(parsed, FileReference):
            return self._import_file(parsed, origin), resolution.target, []
        dotted = isinstance(parsed, QualifiedReference) and parsed.dotted
        with contained(top_package(resolution.target), self._clock) as notes:
            if dotted and not origin.distribution:
                loaded, target = load_dotted(resolution.target, origin)
            else:
                loaded, target = load_target(resolution.target, origin), resolution.target
        return loaded, target, notes

    def _import_file(self, parsed: FileReference, origin: Origin) -> object:
        if parsed.path not in self._files:
            with contained("", self._clock):
                self._files[parsed.path] = load_file(parsed.path, origin)
        return find_attribute(self._files[parsed.path], parsed.attribute, origin)


def check_needed(
    owner: str, needs: frozenset[str], provided: frozenset[str], platform: str
) -> None:
    """Raise PluginError if a plugin needs capabilities that core and platform do not provide.

    owner: the plugin, for the message. provided: the capabilities of the core and the platform.
    """
    missing = sorted(needs - provided)
    if missing:
        # Device names get no hint, because a similar name means another device.
        hinted = [item for item in missing if not item.startswith(DEVICE_PREFIX)]
        hints = "".join(nearest(item, provided) for item in hinted)
        offered = ", ".join(sorted(provided - CORE_CAPABILITIES)) or "nothing"
        raise PluginError(
            f"The {owner} needs {', '.join(missing)}, which neither the core nor the platform "
            f"{platform!r} provides.{hints}\nThe platform provides: {offered}. "
            "Choose another plugin, or another platform."
        )


def check_probe(owner: str, result: object) -> Probe:
    """Return the result of a probe. Raise ContractError if it is not a Probe."""
    if not isinstance(result, Probe):
        raise ContractError(
            f"The probe of the {owner} returned {shorten(result)}; a probe must return a Probe."
        )
    is_list = isinstance(result.reasons, (list, tuple))
    if (
        type(result.usable) is not bool
        or not is_list
        or not all(isinstance(reason, str) for reason in result.reasons)
    ):
        raise ContractError(
            f"The probe of the {owner} returned {shorten(result)}; `usable` must be a bool and "
            "`reasons` a tuple of sentences."
        )
    return result


def probe_failure(owner: str, error: BaseException) -> PluginLoadError:
    """Return the error for a probe that raised an exception."""
    return PluginLoadError(
        f"The probe of the {owner} failed, so it is unknown whether the plugin can be used here: "
        f"{describe_failure(error)}.\nFix the reported cause, or request another plugin by name."
    )
