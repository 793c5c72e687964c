"""Writes a new plugin package from the templates of its blueprint.

This module writes only to a new directory, and deletes it if an error occurs. Templates are files
of the package with placeholders such as `${name}` (`string.Template`).
"""

from __future__ import annotations

import ast
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from string import Template

from dovetail.errors import PluginError
from dovetail.plugin_kinds import GROUP_PREFIX, KINDS, get_kind
from dovetail.plugins.contracts.api_range import parse_version
from dovetail.plugins.contracts.checks import contract_version
from dovetail_devkit.scaffold.blueprint import COMMAND, Blueprint, get_blueprint
from dovetail_devkit.scaffold.plugin_name import PluginName, name_plugin

_TEMPLATES = files("dovetail_devkit.scaffold") / "templates"
_CORE = "dovetail-core"


@dataclass(frozen=True, kw_only=True)
class NewPackage:
    """A package that was written.

    plugins: "kind:name" of each plugin; commands are not listed. files: paths below `folder`.
    """

    folder: Path
    plugins: tuple[str, ...]
    files: tuple[str, ...]


def write_package(kind: str, name: str, out: Path) -> NewPackage:
    """Write a package with a new plugin to the directory `out`/`name`.

    Raises PluginError if the kind has no template, the name is not valid, or the directory exists.
    """
    blueprint, named = get_blueprint(kind), name_plugin(kind, name)
    folder = out / named.name
    if os.path.lexists(folder):
        raise PluginError(
            f"The directory {str(folder)!r} already exists. Choose another name, or another "
            "directory with --out."
        )
    values = _values(kind, blueprint, named)
    contents = list(_files(kind, blueprint, values))
    _check_class_name(named.name, values["cls"], contents)
    written: list[str] = []
    try:
        for path, text in contents:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
            written.append(path)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise PluginError(f"Cannot write to {str(folder)!r}: {error}.") from error
    plugins = tuple(
        f"{entry_point}:{named.name}"
        for entry_point in blueprint.entry_points
        if entry_point in KINDS
    )
    return NewPackage(folder=folder, plugins=plugins, files=tuple(written))


def _files(kind: str, blueprint: Blueprint, values: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the path and the text of each file of the package."""
    package = f"src/{values['package']}"
    yield "pyproject.toml", _render("package/pyproject.toml", values)
    yield "README.md", _render("package/README.md", values)
    yield f"{package}/__init__.py", _render("package/__init__.py", values)
    yield f"{package}/dovetail.toml", values["manifest"]
    for module in blueprint.modules:
        yield f"{package}/{module}.py", _render(f"{kind}/{module}.py", values)
    test = blueprint.test or f"{kind}/test_conformance"
    yield "tests/test_conformance.py", _render(f"{test}.py", values)


def _check_class_name(name: str, cls: str, contents: Sequence[tuple[str, str]]) -> None:
    """Raise PluginError if a module uses the name of the plugin's class for something else."""
    for path, text in contents:
        if not (path.startswith("src/") and path.endswith(".py")):
            continue
        imports = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom))
        names = {alias.asname or alias.name for node in imports for alias in node.names}
        if cls in names:
            raise PluginError(
                f"The plugin name {name!r} gives the class name {cls!r}, which the module of the "
                "plugin imports from the engine. Choose another name."
            )


def _render(template: str, values: Mapping[str, str]) -> str:
    text = (_TEMPLATES / f"{template}.tmpl").read_text(encoding="utf-8")
    return Template(text).substitute(values)


def _values(kind: str, blueprint: Blueprint, named: PluginName) -> dict[str, str]:
    """Return the value of each placeholder of the templates."""
    names = asdict(named) | {
        "cls": _class_name(named.stem, blueprint.suffix),
        "words": named.name.lower().replace("_", "-"),
        "worker_cls": _class_name(named.stem, "Worker"),
        "runtime_cls": _class_name(named.stem, "Runtime"),
        "builder_cls": _class_name(named.stem, "MetadataBuilder"),
        "layer_cls": _class_name(named.stem, "AttentionLayer" if kind == "attention" else "Layer"),
    }
    core = _requirement()
    dependencies = [f"{_CORE}{core}", *(d.format(core=core) for d in blueprint.dependencies)]
    points = {
        item: f"{named.package}.{target.format(**names)}"
        for item, target in blueprint.entry_points.items()
    }
    return names | {
        "kind": kind,
        "folder": named.name,
        "module": blueprint.modules[0],
        "summary": blueprint.summary,
        "use": blueprint.use.format(**names),
        "show": "list command" if kind == COMMAND else f"show {kind}:{named.name}",
        "check": f"pytest {named.name}"
        if kind == COMMAND
        else f"pytest --dovetail-plugin {kind}:{named.name}",
        "contract": "dovetail.plugins.metadata.commands"
        if kind == COMMAND
        else get_kind(kind).contract.partition(":")[0],
        "contract_version": "" if kind == COMMAND else contract_version(kind),
        "core": core,
        "dependencies": "\n".join(f'    "{dependency}",' for dependency in dependencies),
        "entry_points": "\n\n".join(
            f'[project.entry-points."{GROUP_PREFIX}{key}"]\n{_entry_name(key, names)} = "{target}"'
            for key, target in points.items()
        ),
        "manifest": _manifest(blueprint, names),
    }


def _class_name(stem: str, suffix: str) -> str:
    """Return stem + suffix. Omit words at the start of the suffix that already end the stem."""
    for end in range(len(suffix), 0, -1):
        whole_words = end == len(suffix) or suffix[end].isupper()
        if whole_words and stem.endswith(suffix[:end]):
            return stem + suffix[end:]
    return stem + suffix


def _entry_name(kind: str, names: Mapping[str, str]) -> str:
    """Return the name of the entry point. For a command, the words that users type."""
    return names["words"] if kind == COMMAND else names["name"]


def _manifest(blueprint: Blueprint, names: Mapping[str, str]) -> str:
    """Return the text of dovetail.toml, with a table for each entry point."""
    head = "# Dovetail reads this file without importing the package: `dovetail plugins show`.\n"
    tables = []
    for kind in blueprint.entry_points:
        table = f'\n[[plugin]]\nkind = "{kind}"\nname = "{_entry_name(kind, names)}"\n'
        if kind == COMMAND:
            tables.append(f'{table}help = "{blueprint.summary}"\n')
            continue
        roles = ", ".join(f'"{role}"' for role in get_kind(kind).roles)
        tables.append(f'{table}api = "{_api_range(kind)}"\nroles = [{roles}]\n')
    return head + "".join(tables)


def _api_range(kind: str) -> str:
    """Return the range of compatible contract versions.

    With version 0.x, only 0.x is compatible.
    """
    major, minor = parse_version(contract_version(kind)) or (0, 0)
    return f">={major}.{minor},<{major + 1}" if major else f">=0.{minor},<0.{minor + 1}"


def _requirement() -> str:
    """Return the range of compatible dovetail-core versions, by the same rule."""
    try:
        numbers = version(_CORE).split(".")
    except PackageNotFoundError:
        return ""
    major, minor = int(numbers[0]), int(numbers[1])
    return f">={major}.{minor},<{major + 1}" if major else f">=0.{minor},<0.{minor + 1}"
