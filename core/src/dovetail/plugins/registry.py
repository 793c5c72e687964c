"""The plugin registry finds and loads the plugins to which users' references refer.

There is no global registry; each engine has its own. Resolving and describing import nothing;
loading imports only the requested plugin.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import cached_property
from importlib.metadata import Distribution
from typing import TYPE_CHECKING, Any

from dovetail.clock import Clock, MonotonicClock
from dovetail.errors import PluginError
from dovetail.plugin_kinds import KINDS
from dovetail.plugins.admission import Admission, Plugin, check_needed
from dovetail.plugins.capabilities import CORE_CAPABILITIES
from dovetail.plugins.contracts.adapters import ADAPTERS, Adapters
from dovetail.plugins.metadata.description import Describer, Description
from dovetail.plugins.metadata.discovery import Candidate, Discovery, discover
from dovetail.plugins.metadata.first_party import first_party_owner
from dovetail.plugins.metadata.manifest import PluginEntry
from dovetail.plugins.options import PluginOptions, unused_options
from dovetail.plugins.platform_results import provided_capabilities
from dovetail.plugins.resolving.class_denial import ClassRules
from dovetail.plugins.resolving.plugin_policy import PluginPolicy
from dovetail.plugins.resolving.refusals import denied, is_misspelled, namesake_note
from dovetail.plugins.resolving.resolution import Resolution
from dovetail.plugins.resolving.resolver import Resolver

if TYPE_CHECKING:
    from dovetail.interfaces.platform import Platform, Probe

logger = logging.getLogger(__name__)


class PluginRegistry:
    """Finds, resolves, describes and loads plugins, under the user's policy.

    Installed distributions are scanned once, when they are first needed. Loaded classes are cached
    by reference. A failed load is not cached; the next call tries again. platform: the platform of
    the engine, or None before `bind_platform`.
    """

    def __init__(
        self,
        *,
        policy: PluginPolicy | None = None,
        options: Mapping[str, Any] | None = None,
        distributions: Iterable[Distribution] | None = None,
        adapters: Adapters = ADAPTERS,
        clock: Clock | None = None,
    ) -> None:
        """Create a registry of `distributions` (iterated once), or of all installed ones.

        policy: the user's rules. options: options by plugin name. adapters: adapters for plugins of
        earlier contract versions. clock: measures the time of imports.
        """
        self.policy = policy or PluginPolicy()
        self._options = PluginOptions(options)
        self._distributions = distributions
        self._clock = clock or MonotonicClock()
        self._admission = Admission(clock=self._clock, adapters=adapters, options=self._options)
        self._loaded: dict[tuple[str, str | type], Plugin] = {}
        self._failures: dict[str, str] = {}
        self.platform: Platform | None = None
        self._warned: set[str] = set()
        self._chosen: set[tuple[str, str]] = set()
        self._outside_platform = True
        self._provided: frozenset[str] | None = None

    @cached_property
    def _discovery(self) -> Discovery:
        return discover(self._distributions)

    @cached_property
    def _describer(self) -> Describer:
        return Describer(self._discovery)

    @cached_property
    def _resolver(self) -> Resolver:
        return Resolver(self._discovery, self._describer, self.policy)

    @cached_property
    def _class_rules(self) -> ClassRules:
        return ClassRules(self.policy, self._discovery, self._clock)

    @property
    def resolutions(self) -> tuple[Resolution, ...]:
        """The plugins loaded so far, in the order of loading, each once."""
        return tuple(dict.fromkeys(plugin.resolution for plugin in self._loaded.values()))

    @property
    def chosen(self) -> tuple[Resolution, ...]:
        """The loaded plugins except rejected candidates, in the order of loading."""
        passed_over = {kind for kind, _ in self._chosen}
        return tuple(
            resolution
            for resolution in self.resolutions
            if resolution.kind not in passed_over
            or (resolution.kind, resolution.target) in self._chosen
        )

    def note_choice(self, kind: str, cls: type[Any] | None) -> None:
        """Record which of the loaded plugins of `kind` is used. cls: None if none is used."""
        resolution = self.resolution_of(kind, cls)
        if resolution is not None or cls is None:
            target = "" if resolution is None else resolution.target
            self._chosen = {item for item in self._chosen if item[0] != kind} | {(kind, target)}

    @property
    def set_aside(self) -> tuple[str, ...]:
        """Sentences about plugins that are not used, with the reason.

        The reason is an unreadable entry point, a broken manifest that was read, or the failure of
        an automatic candidate.
        """
        read = (*self._discovery.set_aside, *self._describer.problems)
        return (*read, *self._failures.values())

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences about suspicious installations.

        They report distributions with the same name, third-party distributions with a first-party
        name, and third-party plugins with the name of a first-party plugin.
        """
        namesakes = (note for kind in KINDS for note in self._namesakes(kind))
        return (*self._discovery.warnings, *namesakes)

    def warn_of_installations(self) -> None:
        """Log, once, each distribution that is unreadable or has another distribution's name."""
        self._warn((*self._discovery.set_aside, *self._discovery.warnings))

    def candidates(self, kind: str) -> tuple[Candidate, ...]:
        """Return the installed plugins of `kind`: first-party first, then by distribution and name.

        Imports nothing. Raises PluginNotFoundError for an unknown kind.
        """
        return self._resolver.candidates(kind)

    def has_model(self, architecture: str, *, similar: bool = False) -> bool:
        """Return whether a model plugin has this name. similar: accept one wrong letter too."""
        return any(
            architecture == model.name or (similar and is_misspelled(architecture, model.name))
            for model in self.candidates("model")
        )

    def check_manifests(self) -> None:
        """Read every manifest, so that `set_aside` includes each broken one."""
        self._describer.read_all()

    def resolve(self, kind: str, reference: str | type) -> Resolution:
        """Return the plugin of `kind` to which `reference` refers, without importing it.

        Raises PluginNotFoundError if no plugin has that name, and PluginError if several have it,
        if the user's rules deny it, if the reference is malformed, or if it is a file and local
        code is not trusted. A class path is not checked before it is loaded.
        """
        resolution = self._resolver.resolve(kind, reference)
        self._warn(self._namesakes(kind, {reference}))
        return resolution

    def describe(self, kind: str, reference: str | type) -> Description:
        """Return the description of a plugin without importing it.

        Raises the errors of `resolve`, and PluginLoadError if its distribution's manifest is
        broken.
        """
        return self._describer.describe(self.resolve(kind, reference))

    def entry_of(self, candidate: Candidate) -> PluginEntry:
        """Return the manifest entry of a plugin, or an entry of defaults if it is not readable."""
        return self._describer.entry(candidate)

    def denial(self, candidate: Candidate) -> str:
        """Return the user's rule that denies a plugin, as part of a sentence, or "" for none."""
        return self._resolver.denial(candidate)

    def exclusion(self, candidate: Candidate) -> tuple[str, str]:
        """Return why a plugin is excluded from automatic selection, or "" if it is not."""
        return self._resolver.exclusion(candidate)

    def unmet_needs(self, kind: str, reference: str | type) -> str:
        """Return a phrase about needs that the bound platform does not meet, or "" for none.

        Imports nothing. Raises the errors of `describe`.
        """
        missing = self.describe(kind, reference).entry.needs - (self._provided or frozenset())
        if self._provided is None or not missing:
            return ""
        return (
            f"the plugin needs {', '.join(sorted(missing))}, which this platform does not provide"
        )

    def probe(self, kind: str, reference: str | type) -> Probe:
        """Run the probe in a plugin's manifest. A plugin without a probe is usable.

        Raises the errors of `describe`, and PluginLoadError if the probe cannot be imported or
        raises.
        """
        return self._admission.probe(self.describe(kind, reference))

    def load(self, kind: str, reference: str | type) -> type[Any]:
        """Import the class to which `reference` refers, check its contract and return it.

        Raises the errors of `describe`; PluginLoadError if the import fails; PluginNotFoundError if
        the module or class of a class path does not exist; ContractError if the class violates the
        contract or has a different contract version; ConfigError if options are not valid;
        PluginError if the platform does not meet the needs of the plugin.
        """
        key = (kind, reference)
        if key not in self._loaded:
            resolution = self.resolve(kind, reference)
            about = self._describer.describe(resolution)
            self._check_needed(about, about.entry.needs)  # checked before the import
            shared = len(self._kinds_with_options(about.name)) > 0
            plugin = self._admission.admit(resolution, reference, about, shared=shared)
            self._check_needed(about, plugin.needs)
            forbidden, rule = self._class_rules.denial(kind, plugin.cls)
            if rule:
                raise denied(f"{kind} {reference!r} (class {forbidden})", rule)
            self._loaded[key] = plugin
        return self._loaded[key].cls

    def put_aside(self, owner: str, error: PluginError) -> None:
        """Record the failure of an automatic candidate and warn once. owner: "kind name@dist"."""
        if owner not in self._failures:
            self._failures[owner] = f"The {owner} is skipped in automatic selection: {error}"
            logger.warning("%s", self._failures[owner])

    def automatic(self, kind: str, preferred: Sequence[str] = ()) -> list[Candidate]:
        """Return the plugins that may be selected automatically, in the order to try them.

        preferred: the platform's preferred names, best first. A first-party platform can only
        prefer third-party plugins that the user allowed. Raises PluginError for an ambiguous name.
        """
        order = self._resolver.automatic(kind, preferred, outside=self._outside_platform)
        self._warn(self._namesakes(kind, set(preferred)))
        return order

    def options_of(self, kind: str, cls: type[Any] | None) -> Mapping[str, object]:
        """Return the validated options of a loaded class, or {} if it takes none."""
        resolution = self.resolution_of(kind, cls)
        return {} if resolution is None else resolution.options

    def resolution_of(self, kind: str, cls: type[Any] | None) -> Resolution | None:
        """Return the resolution of a class that this registry has loaded, or None."""
        resolutions = (p for (k, _), p in self._loaded.items() if k == kind and p.cls is cls)
        plugin = next(resolutions, None)
        return None if plugin is None else plugin.resolution

    def check_option_names(self, chosen: Iterable[tuple[str, str | type]]) -> None:
        """Raise ConfigError for options of a plugin that is neither installed nor in `chosen`.

        chosen: (kind, reference) of the plugins in the configuration.
        """
        if not self._options.keys:
            return
        known = [
            key for kind in KINDS for candidate in self.candidates(kind) for key in candidate.keys
        ]
        for kind, reference in chosen:
            known += self.resolve(kind, reference).keys
        kinds_of = {key: self._kinds_with_options(key) for key in self._options.keys}
        self._options.check_names(known, kinds_of)

    def check_options_used(self, chosen: Mapping[str, Sequence[str | type]]) -> None:
        """Raise ConfigError for options of an installed plugin that is not in `chosen`.

        chosen: maps each kind whose plugins are selected to their references.
        """
        for key in self._options.keys:
            owners = [
                candidate
                for name in KINDS
                for candidate in self.candidates(name)
                if key in candidate.keys
            ]
            declared = [owner for owner in owners if self._describer.entry(owner).options]
            kinds = {item.kind for item in declared or owners}
            if not kinds or not kinds <= chosen.keys():
                continue
            used = [self.resolve(kind, item) for kind in sorted(kinds) for item in chosen[kind]]
            if not any(key in item.keys for item in used):
                raise unused_options(sorted(kinds)[0], key, [item.name for item in used])

    def bind_platform(self, platform: Platform) -> None:
        """Check each plugin's needs against the capabilities of the core and `platform`.

        Plugins that are already loaded are checked now. Raises the PluginError of `load`.
        """
        loaded = (p for p in self._loaded.values() if p.cls is type(platform))
        claimed = next((plugin.provides for plugin in loaded), frozenset[str]())
        self.platform = platform
        self.note_choice("platform", type(platform))
        self._outside_platform = not first_party_owner(type(platform).__module__)
        own = provided_capabilities(platform)
        self._provided = CORE_CAPABILITIES | own | claimed
        for plugin in self._loaded.values():
            self._check_needed(plugin.description, plugin.needs)

    def _namesakes(self, kind: str, names: Set[str | type] | None = None) -> Iterator[str]:
        """Yield a sentence for each third-party plugin with the name of a first-party plugin.

        names: limits the check to these names. Denied plugins are skipped.
        """
        kept = {
            candidate.name: candidate
            for candidate in self.candidates(kind)
            if candidate.first_party
        }
        for candidate in self.candidates(kind):
            is_selected = candidate.name in kept and (names is None or candidate.name in names)
            if is_selected and not candidate.first_party and not self._resolver.denial(candidate):
                yield namesake_note(kept[candidate.name], candidate)

    def warn(self, sentence: str) -> None:
        """Log a warning, unless this registry has logged the same sentence before."""
        self._warn((sentence,))

    def _warn(self, sentences: Iterable[str]) -> None:
        """Log each sentence as a warning, unless it was logged before."""
        for sentence in sentences:
            if sentence not in self._warned:
                self._warned.add(sentence)
                logger.warning("%s", sentence)

    def _check_needed(self, about: Description, needs: frozenset[str]) -> None:
        """Raise PluginError if a platform is bound and does not meet the needs of the plugin."""
        if self._provided is not None:
            name = "" if self.platform is None else self.platform.info.name
            check_needed(str(about), needs, self._provided, name)

    def _kinds_with_options(self, name: str) -> list[str]:
        """Return the kinds of the plugins called `name` that declare an options model."""
        return [
            kind
            for kind in KINDS
            for candidate in self.candidates(kind)
            if candidate.name == name and self._describer.entry(candidate).options
        ]
