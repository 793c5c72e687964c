"""Cases for plugins of every kind, such as loading and the signatures of the contract.

Two of the cases run in a new interpreter: describing a plugin must not import it, and importing it
must have no side effects. This can be checked only if the plugin was not imported before.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from dovetail.errors import PluginError
from dovetail.plugins import PluginPolicy, PluginRegistry, check_contract
from dovetail.plugins.loading import Origin, load_target
from dovetail.plugins.metadata.manifest import PluginEntry
from dovetail_devkit.case import Case
from dovetail_devkit.expectation import SkipCase, checking, expect

CHILD_S = 120

_CHILD = """
import sys, threading
from dovetail.plugins import PluginPolicy, PluginRegistry

what, kind, reference = sys.argv[1:]
registries = [PluginRegistry(policy=PluginPolicy(trust_local_code=True)) for _ in range(2)]
about = registries[0].describe(kind, reference)
module = about.target.partition(":")[0]
if module in sys.modules:
    sys.exit(f"describing the plugin imports {module}")
if what == "load":
    loaded = [registry.load(kind, reference) for registry in registries]
    if loaded[0] is not loaded[1] and "/" not in module:
        sys.exit("two registries in one process load different classes")
    notes = [n for one in registries[0].resolutions for n in one.notes if "printed" in n]
    if notes:
        sys.exit(f"importing the plugin prints: {notes}")
    if threading.active_count() > 1:
        sys.exit(f"importing the plugin starts threads: {threading.enumerate()}")
"""


@dataclass(frozen=True, kw_only=True)
class PluginSubject:
    """A plugin that the user named. cls: the plugin's class, or None if loading raised `error`."""

    kind: str
    reference: str
    registry: PluginRegistry
    cls: type[Any] | None = None
    error: PluginError | None = None

    def __str__(self) -> str:
        """Return the reference as the user wrote it: "kind:name"."""
        return f"{self.kind}:{self.reference}"


def make_registry(options: dict[str, Any] | None = None) -> PluginRegistry:
    """Return a registry that trusts local plugin files: the user requested this check."""
    return PluginRegistry(policy=PluginPolicy(trust_local_code=True), options=options)


def plugin_cases(subject: PluginSubject) -> Iterator[Case]:
    """Yield the cases that every plugin must pass."""
    checks = {
        "manifest": _check_manifest,
        "a description does not import the plugin": _check_description,
        "the plugin loads without side effects": _check_loading,
        "contract": _check_contract,
    }
    entry = _entry(subject)
    if entry.options or _class_options(subject) is not None:
        checks["options"] = _check_options
    if entry.probe:
        checks["probe"] = _check_probe
    for name, check in checks.items():
        yield Case(name=name, run=partial(_judge, check, subject))


def _entry(subject: PluginSubject) -> PluginEntry:
    """Return a plugin's manifest entry, or the defaults if it cannot be read."""
    try:
        return subject.registry.describe(subject.kind, subject.reference).entry
    except PluginError:
        # The case "manifest" reports this error.
        return PluginEntry(kind=subject.kind, name=subject.reference)


def _class_options(subject: PluginSubject) -> object:
    return getattr(subject.cls, "options_model", None)


def _judge(check: Any, subject: PluginSubject) -> None:
    with checking(f"{subject.kind} {subject.reference!r}"):
        check(subject)


def _check_manifest(subject: PluginSubject) -> None:
    about = subject.registry.describe(subject.kind, subject.reference)
    if not about.distribution:
        raise SkipCase("the plugin is given as a class, and a class has no manifest")
    if not about.in_manifest:
        raise SkipCase(f"{about.distribution} has no dovetail.toml that lists the plugin")


def _check_description(subject: PluginSubject) -> None:
    _run_child("describe", subject)


def _check_loading(subject: PluginSubject) -> None:
    _run_child("load", subject)


def _check_contract(subject: PluginSubject) -> None:
    if subject.cls is None:
        raise AssertionError(str(subject.error))
    check_contract(subject.kind, subject.cls)


def _check_options(subject: PluginSubject) -> None:
    model = _options_model(subject)
    extra = getattr(model, "model_config", {}).get("extra")
    expect(
        extra == "forbid",
        f"the options model {model!r} has extra={extra!r}; write extra='forbid', so that a "
        "misspelled option is rejected",
    )


def _check_probe(subject: PluginSubject) -> None:
    probes = [subject.registry.probe(subject.kind, subject.reference) for _ in range(2)]
    expect(
        probes[0] == probes[1],
        f"two calls of the plugin's probe return {probes[0]} and {probes[1]}; they must be equal",
    )
    expect(
        probes[0].usable or bool(probes[0].reasons),
        "a probe that returns usable=False must give a reason",
    )


def unusable_reason(subject: PluginSubject) -> str:
    """Return the reason if the manifest's probe reports that the plugin is unusable, else ""."""
    try:
        probe = subject.registry.probe(subject.kind, subject.reference)
    except PluginError:
        return ""  # the case "probe" reports this error
    return "" if probe.usable else "; ".join(probe.reasons) or "the probe gives no reason"


def _options_model(subject: PluginSubject) -> object:
    named = _entry(subject).options
    if named:
        return load_target(named, Origin(reference=subject.reference))
    return _class_options(subject)


def _run_child(what: str, subject: PluginSubject) -> None:
    """Run the check in a new interpreter with the same path. Raise AssertionError if it fails."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", _CHILD, what, subject.kind, subject.reference]
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=CHILD_S,
        check=False,
    )
    error_lines = (
        done.stderr.strip().splitlines()
        or [f"the interpreter that loads the plugin exited with code {done.returncode}"]
    )[-1]
    expect(done.returncode == 0, error_lines)
    expect(not done.stdout, f"loading the plugin prints {done.stdout[:200]!r} to stdout")
