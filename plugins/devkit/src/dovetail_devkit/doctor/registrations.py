"""Checks plugin declarations for consistency: metadata, manifests, names, contract versions.

This module reads entry points and manifests. It imports no plugin.
"""

from __future__ import annotations

from collections.abc import Iterator

from dovetail.cli.app import COMMANDS
from dovetail.errors import PluginError, nearest
from dovetail.plugin_kinds import KINDS
from dovetail.plugins.contracts.adapters import ADAPTERS, check_api
from dovetail.plugins.metadata.commands import KIND as COMMAND
from dovetail.plugins.metadata.commands import find_commands
from dovetail.plugins.metadata.description import Description
from dovetail.plugins.metadata.discovery import Candidate, discover
from dovetail.plugins.registry import PluginRegistry
from dovetail_devkit.doctor.finding import BROKEN, NOTE, OK, WARNING, Finding

_AREA = "plugins"
_NO_KINDS = frozenset({COMMAND})
"""Entry point groups of this project that do not contain plugins."""


def check_registrations(registry: PluginRegistry) -> Iterator[Finding]:
    """Yield a finding for each problem of plugin declarations, or one finding if there is none."""
    findings = [
        *_unreadable(registry),
        *_unknown_kinds(),
        *_suspicious(registry),
        *_conflicts(registry),
        *_mismatches(registry),
        *_replacements(registry),
        *_commands(),
    ]
    yield from findings
    if all(finding.verdict == NOTE for finding in findings):
        count = sum(len(registry.candidates(kind)) for kind in KINDS)
        text = f"the declarations of {count} plugins are readable and consistent"
        yield Finding(area=_AREA, subject="declarations", verdict=OK, text=text)


def plugins_to_try(registry: PluginRegistry) -> list[Candidate]:
    """Return the plugins that have a valid description and a supported contract version."""
    every = [candidate for kind in KINDS for candidate in registry.candidates(kind)]
    allowed = [item for item in every if not registry.denial(item)]
    return [candidate for candidate in allowed if not _rejection(registry, candidate)]


def _unreadable(registry: PluginRegistry) -> Iterator[Finding]:
    registry.check_manifests()
    for sentence in registry.set_aside:
        yield Finding(
            area=_AREA,
            subject="declarations",
            verdict=BROKEN,
            text=sentence,
            remedy="fix the declaration, or install another version of the distribution, or "
            "uninstall it",
        )


def _suspicious(registry: PluginRegistry) -> Iterator[Finding]:
    """Yield the registry's warnings about plugin names that two distributions use."""
    for sentence in registry.warnings:
        problem, _, remedy = sentence.partition(". ")
        yield Finding(
            area=_AREA, subject="names", verdict=WARNING, text=problem, remedy=remedy.rstrip(".")
        )


def _unknown_kinds() -> Iterator[Finding]:
    for installation in discover().installations.values():
        for kind in sorted({kind for kind, _ in installation.declared} - KINDS.keys() - _NO_KINDS):
            names = ", ".join(name for its_kind, name in installation.declared if its_kind == kind)
            yield Finding(
                area=_AREA,
                subject=installation.distribution,
                verdict=WARNING,
                text=f"the distribution declares {names} of the kind {kind!r}, which the installed "
                f"dovetail-core does not support.{nearest(kind, KINDS)}",
                remedy="correct the entry point group, or install a dovetail-core with this kind",
            )


def _conflicts(registry: PluginRegistry) -> Iterator[Finding]:
    """Yield a finding for each ambiguous name of a kind, unless a rule selects one plugin."""
    for kind in KINDS:
        names = [candidate.name for candidate in registry.candidates(kind)]
        for name in sorted({name for name in names if names.count(name) > 1}):
            try:
                registry.resolve(kind, name)
            except PluginError as error:
                problem, _, remedy = str(error).partition("\n")
                yield Finding(
                    area=_AREA,
                    subject=f"{kind}:{name}",
                    verdict=BROKEN,
                    text=problem,
                    remedy=remedy.replace("\n", " "),
                )


def _mismatches(registry: PluginRegistry) -> Iterator[Finding]:
    """Yield a finding for each plugin that was written for another contract version."""
    for candidate in (item for kind in KINDS for item in registry.candidates(kind)):
        about = _describe(registry, candidate)
        problem, _, remedy = (_api_problem(about) if about is not None else "").partition("\n")
        if problem:
            yield Finding(
                area=_AREA,
                subject=f"{candidate.kind}:{candidate.reference}",
                verdict=BROKEN,
                text=problem,
                remedy=remedy,
            )


def _replacements(registry: PluginRegistry) -> Iterator[Finding]:
    """Yield a finding for each plugin that declares a replacement that the user has not allowed."""
    for candidate in (item for kind in KINDS for item in registry.candidates(kind)):
        about = _describe(registry, candidate)
        kind, name, owner = candidate.kind, candidate.name, candidate.distribution
        if about is None or registry.policy.consents(kind, name, owner):
            continue
        for replaced in about.entry.replaces:
            yield Finding(
                area=_AREA,
                subject=f"{kind}:{candidate.reference}",
                verdict=NOTE,
                text=f"the plugin replaces {replaced} only if you allow it",
                remedy="to allow this, add the option --plugins-allow "
                f"'{kind}:{candidate.reference}'",
            )


def _commands() -> Iterator[Finding]:
    """Yield a finding for each plugin command whose name is invalid."""
    for command, reason in find_commands([words for words, *_ in COMMANDS]).set_aside:
        yield Finding(
            area=_AREA,
            subject=f"{COMMAND}:{command.plugin.reference}",
            verdict=WARNING,
            text=f"the command's name is not valid: {reason}",
            remedy="ask the author to rename the command, or uninstall the distribution",
        )


def _rejection(registry: PluginRegistry, candidate: Candidate) -> str:
    about = _describe(registry, candidate)
    return "the manifest is broken" if about is None else _api_problem(about)


def _describe(registry: PluginRegistry, candidate: Candidate) -> Description | None:
    """Return a plugin's details, or None if its manifest is broken or its name is not unique."""
    try:
        return registry.describe(candidate.kind, reference_of(registry, candidate))
    except PluginError:
        return None


def reference_of(registry: PluginRegistry, candidate: Candidate) -> str:
    """Return a reference to this plugin.

    If the distribution declares the name twice, the reference is the plugin's class.
    """
    same = [
        item
        for item in registry.candidates(candidate.kind)
        if item.reference == candidate.reference
    ]
    return candidate.reference if len(same) == 1 else candidate.target


def _api_problem(about: Description) -> str:
    try:
        check_api(about.kind, about.entry.api, str(about), ADAPTERS)
    except PluginError as error:
        return str(error)
    return ""
