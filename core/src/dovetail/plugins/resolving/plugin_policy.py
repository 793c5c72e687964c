"""The user's rules: plugins that are denied, selected automatically, or replace other plugins.

This module loads no plugins. A scheduling policy is something else: a kind of plugin.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from dovetail.errors import ConfigError, nearest
from dovetail.plugin_kinds import KINDS
from dovetail.plugins.metadata.first_party import normalize_distribution

if TYPE_CHECKING:
    from dovetail.interfaces.requested_config import PluginsConfig
    from dovetail.plugins.metadata.discovery import Candidate

_RULE_FORM = "kind:name@distribution, such as 'policy:fast@acme' or '*:*@acme'"
_GLOB = re.compile(r"[*?\[]")


@dataclass(frozen=True, kw_only=True)
class PluginPolicy:
    """The user's rules for plugins. Each rule is a glob pattern "kind:name@distribution".

    allow: third-party plugins that may be selected automatically, and may replace the plugins named
    in their manifests.
    deny: plugins that are never used, even if they are allowed or requested.
    no_plugins: only first-party plugins are used. strict: an automatic candidate that fails raises
    instead of being skipped. trust_local_code: files ("./file.py:Class") may be run. Raises
    ConfigError for a malformed rule or an unknown kind.
    """

    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    no_plugins: bool = False
    strict: bool = False
    trust_local_code: bool = False

    @classmethod
    def of(cls, config: PluginsConfig) -> PluginPolicy:
        """Return the rules of a configuration."""
        return cls(
            allow=config.plugins_allow,
            deny=config.plugins_deny,
            no_plugins=config.no_plugins,
            strict=config.plugins_strict,
            trust_local_code=config.trust_local_code,
        )

    def __post_init__(self) -> None:
        for option, rules in (("plugins_allow", self.allow), ("plugins_deny", self.deny)):
            for rule in rules:
                _check_rule(option, rule)

    def denial(self, kind: str, name: str, distribution: str, *, first_party: bool) -> str:
        """Return the rule that denies this plugin, as part of a sentence, or "" for none."""
        for rule in self.deny:
            if _matches(rule, kind, name, distribution):
                return f"the rule {rule!r} of plugins_deny"
        if self.no_plugins and not first_party:
            return "the option no_plugins, which permits only first-party plugins"
        return ""

    def denial_of(self, candidate: Candidate) -> str:
        """Return the rule that denies an installed plugin, or "" for none."""
        return self.denial(
            candidate.kind,
            candidate.name,
            candidate.distribution,
            first_party=candidate.first_party,
        )

    def consents(self, kind: str, name: str, distribution: str) -> bool:
        """Return whether a rule of `allow` matches this plugin."""
        return any(_matches(rule, kind, name, distribution) for rule in self.allow)


def _matches(rule: str, kind: str, name: str, distribution: str) -> bool:
    of_kind, _, rest = rule.partition(":")
    of_name, _, of_distribution = rest.rpartition("@")
    return (
        fnmatchcase(kind, of_kind)
        and fnmatchcase(name, of_name)
        and fnmatchcase(
            normalize_distribution(distribution), normalize_distribution(of_distribution)
        )
    )


def _check_rule(option: str, rule: object) -> None:
    kind, colon, rest = rule.partition(":") if isinstance(rule, str) else ("", "", "")
    name, at, distribution = rest.rpartition("@")
    if not (kind and colon and name and at and distribution):
        raise ConfigError(f"{option}: {rule!r} is not a valid rule. Write {_RULE_FORM}.")
    if kind not in KINDS and not _GLOB.search(kind):
        raise ConfigError(
            f"{option}: {rule!r} names the unknown kind {kind!r}.{nearest(kind, KINDS)} "
            f"Kinds: {', '.join(KINDS)}; or write * for all."
        )
