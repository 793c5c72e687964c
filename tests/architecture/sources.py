"""Finds and parses the project's source files for the architecture tests.

This module contains no rules.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MEMBER_FOLDERS = (
    "core",
    "platforms/*",
    "attention_backends/*",
    "schedulers/*",
    "model_registry",
    "plugins/*",
)
OTHER_FOLDERS = ("tests", "examples", "bench")
SKIPPED = frozenset({"__pycache__", "build", "dist", ".venv"})


@cache
def members() -> tuple[Path, ...]:
    """Return the directories of all members, sorted. Each contains a pyproject.toml."""
    actual = (path for pattern in MEMBER_FOLDERS for path in ROOT.glob(pattern))
    return tuple(sorted(path for path in actual if (path / "pyproject.toml").is_file()))


def project_of(folder: Path) -> dict[str, Any]:
    """Return the [project] table of the pyproject.toml in `folder`."""
    table: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]
    return table


def files_below(folder: Path, *suffixes: str) -> Iterator[Path]:
    """Yield the files below `folder` with one of `suffixes`, sorted, without build outputs."""
    for path in sorted(folder.rglob("*")):
        if path.suffix in suffixes and not SKIPPED & set(path.parts) and path.is_file():
            yield path


@cache
def shipped_files() -> tuple[Path, ...]:
    """Return the Python files that members ship: those below their src directories."""
    return tuple(path for member in members() for path in files_below(member / "src", ".py"))


@cache
def written_files() -> tuple[Path, ...]:
    """Return every Python file of the project: members, tests, examples, benchmarks."""
    folders = [*members(), *(ROOT / name for name in OTHER_FOLDERS)]
    below = (path for folder in folders for path in files_below(folder, ".py"))
    return (*ROOT.glob("*.py"), *below)


@cache
def native_files() -> tuple[Path, ...]:
    """Return the C++ sources and headers of all members."""
    return tuple(path for member in members() for path in files_below(member, ".cpp", ".h"))


@cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a Python file."""
    return ast.parse(path.read_text("utf-8"), filename=str(path))


def relative(path: Path) -> str:
    """Return `path` relative to the root of the repository, with slashes."""
    return path.relative_to(ROOT).as_posix()


def module_name(path: Path) -> str:
    """Return the dotted name of a shipped file."""
    parts = path.with_suffix("").parts
    dotted = parts[len(parts) - parts[::-1].index("src") :]
    return ".".join(dotted).removesuffix(".__init__")


@cache
def imported_names(tree: ast.Module) -> tuple[tuple[str, int], ...]:
    """Return (dotted module, line) of every absolute import, including imports inside functions."""
    collected: list[tuple[str, int]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            collected += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            collected.append((node.module, node.lineno))
    return tuple(collected)


def dotted_name(node: ast.expr) -> str:
    """Return "a.b.c" for a name or a chain of attributes, "" for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


@cache
def documents() -> tuple[Path, ...]:
    """Return every Markdown document of the project."""
    folders = [*members(), *(ROOT / name for name in (*OTHER_FOLDERS, "docs"))]
    below = (path for folder in folders for path in files_below(folder, ".md"))
    return (*sorted(ROOT.glob("*.md")), *below)
