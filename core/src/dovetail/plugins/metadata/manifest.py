"""The static manifest, `dovetail.toml`: properties of plugins that are needed before the import.

It is next to the `__init__.py` of a package and has one [[plugin]] table per plugin. Missing keys
and missing plugins have defaults. A manifest with any error is rejected as a whole, so that no
error is overlooked.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import Distribution
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote, urlparse

from dovetail.errors import nearest
from dovetail.plugin_kinds import KINDS, ROLES
from dovetail.plugins.contracts.api_range import parse_range
from dovetail.plugins.metadata.discovery import Installation
from dovetail.plugins.metadata.metadata_files import (
    MAX_ENTRY_POINTS_BYTES,
    MAX_RECORD_BYTES,
    read_metadata,
    read_regular_text,
)
from dovetail.value_checks import shorten

FILE_NAME = "dovetail.toml"
MAX_BYTES = 1 << 18
_MAX_DOTS = 200
"""Maximum dots in a line, because the parser's time is quadratic in the parts of a key."""

_CAPABILITY = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+)*")
_TARGET = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_REPLACED = re.compile(r"[a-z_]+:[^@\s]+@[^@\s]+")


@dataclass(frozen=True, kw_only=True)
class PluginEntry:
    """One [[plugin]] table of a manifest.

    api: range of contract versions; "" if the table has none. provides, needs: capability ids.
    probe: "module:function" that returns a Probe. options: "module:Model" of a pydantic model.
    rank: the highest is tried first. replaces: "kind:name@distribution". roles: processes that load
    it.
    verified: the author's note on which device and when the plugin was tested; "" if it runs on any
    CPU.
    """

    kind: str
    name: str
    api: str = ""
    provides: frozenset[str] = frozenset()
    needs: frozenset[str] = frozenset()
    probe: str = ""
    options: str = ""
    rank: int = 0
    replaces: tuple[str, ...] = ()
    roles: frozenset[str] = frozenset(ROLES)
    verified: str = ""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of a distribution's manifests.

    entries: by (kind, name); empty if there are problems. problems: phrases with the file name.
    """

    entries: Mapping[tuple[str, str], PluginEntry]
    problems: tuple[str, ...] = ()


def read_manifest(installation: Installation) -> Manifest:
    """Read the manifests of a distribution's packages without importing them."""
    entries: dict[tuple[str, str], PluginEntry] = {}
    problems: list[str] = []
    for path in find_files(installation):
        tables, invalid = _read_file(path, installation.declared)
        problems += [f"{path}: {problem}" for problem in invalid]
        entries |= {(entry.kind, entry.name): entry for entry in tables}
    return Manifest(entries={} if problems else entries, problems=tuple(problems))


def read_tables(installation: Installation, kind: str) -> dict[str, Mapping[str, Any]]:
    """Return the manifest tables of one kind, by name, without checking them or importing code.

    For kinds that are not in `KINDS`. A manifest that cannot be read is skipped; `read_manifest`
    reports it.
    """
    read: dict[str, Mapping[str, Any]] = {}
    for path in find_files(installation):
        with suppress(ValueError, TypeError):
            plugins = _parse(path).get("plugin", [])
            tables = (
                plugin
                for plugin in plugins
                if isinstance(plugin, dict) and plugin.get("kind") == kind
            )
            read.update({str(table.get("name")): table for table in tables})
    return read


def find_files(installation: Installation) -> Iterator[Path]:
    """Yield the manifests of a distribution, at most one per top-level package.

    Manifests in packages of other distributions are not included.
    """
    metadata = installation.metadata
    for package in installation.packages:
        path = Path(str(metadata.locate_file(f"{package}/{FILE_NAME}")))
        if os.path.lexists(path):
            record = _text_of(metadata, "RECORD", MAX_RECORD_BYTES)
            if record is None or f"{package}/{FILE_NAME}" in record:
                yield path
        elif (project := _editable_project(metadata)) is not None:
            files = (folder / FILE_NAME for folder in _package_folders(package))
            yield from (item for item in files if project in item.parents and os.path.lexists(item))


def _editable_project(metadata: Distribution) -> Path | None:
    """Return the directory that a distribution was installed from, if it is editable (PEP 610)."""
    try:
        metadata_json = json.loads(
            _text_of(metadata, "direct_url.json", MAX_ENTRY_POINTS_BYTES) or "{}"
        )
        editable = metadata_json.get("dir_info", {}).get("editable")
        return Path(unquote(urlparse(metadata_json["url"]).path)) if editable else None
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return None


def _text_of(metadata: Distribution, name: str, max_bytes: int) -> str | None:
    try:
        return read_metadata(metadata, name, max_bytes=max_bytes)
    except ValueError:
        return None  # an unreadable file is treated as missing


def _package_folders(package: str) -> list[Path]:
    # Finding the spec of a top-level package imports nothing; for a subpackage it imports parents.
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError, AttributeError):
        return []  # the finder failed or the module has no spec; loading reports it
    return [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]


def _read_file(
    path: Path, declared: frozenset[tuple[str, str]]
) -> tuple[list[PluginEntry], list[str]]:
    try:
        table = _parse(path)
    except ValueError as error:
        return [], [f"it cannot be read: {error}"]
    tables = table.get("plugin", [])
    foreign = [key for key in table if key != "plugin"]
    if foreign or not isinstance(tables, list) or not all(isinstance(t, dict) for t in tables):
        at_fault = (
            f"remove the key {foreign[0]!r}" if foreign else "'plugin' is not an array of tables"
        )
        return [], [f"only [[plugin]] tables are allowed; {at_fault}"]
    entries, problems = [], []
    for index, item in enumerate(tables, 1):
        known = _is_of_another_core(item, declared)
        invalid = [] if known else list(_problems(item, declared))
        problems += [f"[[plugin]] {index}: {problem}" for problem in invalid]
        if not invalid and not known:
            entries.append(_entry(item))
    names = [(entry.kind, entry.name) for entry in entries]
    problems += [f"{':'.join(n)} occurs twice" for n in set(names) if names.count(n) > 1]
    return entries, problems


def _parse(path: Path) -> dict[str, Any]:
    """Return the tables of a manifest. Raise ValueError if it is invalid or too large."""
    text = read_regular_text(path, max_bytes=MAX_BYTES)
    if text is None:
        raise ValueError(f"{path.name} is not a regular file")
    if any(line.count(".") > _MAX_DOTS for line in text.splitlines()):
        raise ValueError(f"a line has more than {_MAX_DOTS} dots")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("arrays or tables are nested too deeply") from None


def _is_of_another_core(table: Mapping[str, Any], declared: frozenset[tuple[str, str]]) -> bool:
    """Return whether a table describes a declared plugin of a kind that this core does not have."""
    kind, name = table.get("kind"), table.get("name")
    if not isinstance(kind, str) or not isinstance(name, str):
        return False
    return kind not in KINDS and (kind, name) in declared


def _problems(table: Mapping[str, Any], declared: frozenset[tuple[str, str]]) -> Iterator[str]:
    for key in table:
        if key not in _CHECKS:
            known = ", ".join(_CHECKS)
            yield f"{shorten(key)} is not a known key.{nearest(key, _CHECKS)} Keys: {known}"
    for key, check in _CHECKS.items():
        problem = check(table[key]) if key in table else ""
        if problem:
            yield f"{key} = {shorten(table[key])}: {problem}"
    kind, name = table.get("kind"), table.get("name")
    if kind is None or name is None:
        yield "the table does not identify a plugin; set kind and name"
    elif not isinstance(kind, str) or not isinstance(name, str):
        return  # the check of the key has reported it
    elif kind in KINDS and (kind, name) not in declared:
        of_kind = sorted(item for its_kind, item in declared if its_kind == kind)
        yield (
            f"the distribution has no {kind} {shorten(name)}.{nearest(name, of_kind)} "
            f"Its entry points of that kind: {', '.join(of_kind) or 'none'}. If it is new in an "
            "editable installation, reinstall the distribution"
        )
    for replaced in table.get("replaces", ()):
        if isinstance(replaced, str) and replaced.partition(":")[0] != kind:
            yield f"replaces = {replaced!r}: a {kind} can only replace a {kind}"


def _entry(table: Mapping[str, Any]) -> PluginEntry:
    values = dict(table)
    for key in ("provides", "needs", "roles"):
        if key in values:
            values[key] = frozenset(values[key])
    values["replaces"] = tuple(values.get("replaces", ()))
    return PluginEntry(**values)


def _kind_problem(value: object) -> str:
    if isinstance(value, str) and value in KINDS:
        return ""
    return f"unknown kind.{nearest(str(value), KINDS)} Kinds: {', '.join(KINDS)}"


def _api_problem(value: object) -> str:
    try:
        parse_range(value)
    except ValueError as error:
        return str(error)
    return ""


def _strings(pattern: re.Pattern[str], form: str) -> Callable[[object], str]:
    """Return a check that a value is an array of strings that match `pattern`.

    form: a description of such strings, for the message.
    """

    def check(value: object) -> str:
        items = value if isinstance(value, list) else [None]
        valid = all(isinstance(item, str) and pattern.fullmatch(item) for item in items)
        return "" if valid else f"write an array of {form}"

    return check


def _text(pattern: str, form: str) -> Callable[[object], str]:
    """Return a check that a value is a string that matches `pattern`.

    form: a description of such a string, for the message.
    """

    def check(value: object) -> str:
        valid = isinstance(value, str) and re.fullmatch(pattern, value)
        return "" if valid else f"write {form}"

    return check


def _rank_problem(value: object) -> str:
    return "" if type(value) is int else "write an integer"


_CHECKS: Mapping[str, Callable[[object], str]] = MappingProxyType(
    {
        "kind": _kind_problem,
        "name": _text(r"\S(.*\S)?", "the name of an entry point"),
        "api": _api_problem,
        "provides": _strings(_CAPABILITY, "capability ids, such as 'sleep'"),
        "needs": _strings(_CAPABILITY, "capability ids, such as 'dtype.bfloat16'"),
        "probe": _text(_TARGET.pattern, "'package.module:function'"),
        "options": _text(_TARGET.pattern, "'package.module:Model'"),
        "rank": _rank_problem,
        "replaces": _strings(_REPLACED, "'kind:name@distribution'"),
        "roles": _strings(re.compile("|".join(ROLES)), " and ".join(ROLES)),
        "verified": _text(r"\S(.{0,198}\S)?", "one line of at most 200 characters"),
    }
)
