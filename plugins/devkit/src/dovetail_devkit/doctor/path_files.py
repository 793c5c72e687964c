"""Checks `.pth` files, which run code at the start of every Python process of this environment.

The interpreter executes each line that begins with `import` before the program. Legitimate packages
use this, and so does malware. The files are read, but not executed.
"""

from __future__ import annotations

import re
import site
from collections.abc import Iterator
from fnmatch import fnmatch
from importlib.metadata import distributions
from pathlib import Path

from dovetail_devkit.doctor.finding import OK, WARNING, Finding

KNOWN: tuple[tuple[str, str, str], ...] = (
    ("__editable__*.pth", "__editable__", "setuptools finds an editable package"),
    ("_editable_impl_*.pth", "_editable_impl_", "editables finds an editable package"),
    ("*-nspkg.pth", "importlib", "setuptools sets up an old-style namespace package"),
    ("_virtualenv.pth", "_virtualenv", "virtualenv makes distutils install into the environment"),
    ("a1_coverage.pth", "coverage", "coverage measures subprocesses if this is enabled"),
    (
        "distutils-precedence.pth",
        "_distutils_hack",
        "setuptools replaces the standard distutils",
    ),
    ("pywin32.pth", "pywin32_bootstrap", "pywin32 adds its library directory"),
)
"""Known files: name, a word that every executed line contains, and the purpose of the file."""

_AREA = "environment"
_EXECUTED = re.compile(r"import[ \t]")
_MAX_SHOWN = 100


def check_path_files(folders: list[Path] | None = None) -> Iterator[Finding]:
    """Yield a finding for each `.pth` file that runs code, and one finding for all other files.

    folders: the directories to check; None for the directories of the running Python.
    """
    plain = 0
    for path in _path_files(site_folders() if folders is None else folders):
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            text = f"(not readable: {error})"
        lines = [line.strip() for line in text.splitlines() if _EXECUTED.match(line)]
        if lines:
            yield _judge(path, lines)
        else:
            plain += 1
    text = f"{plain} .pth files contain only names of directories"
    yield Finding(area=_AREA, subject=".pth files", verdict=OK, text=text)


def site_folders() -> list[Path]:
    """Return the directories in which the running Python reads `.pth` files at startup."""
    folders = [*site.getsitepackages()]
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    return [Path(folder) for folder in dict.fromkeys(folders)]


def _path_files(folders: list[Path]) -> Iterator[Path]:
    for folder in folders:
        # The interpreter also skips hidden files.
        yield from sorted(p for p in folder.glob("*.pth") if not p.name.startswith("."))


def _judge(path: Path, lines: list[str]) -> Finding:
    for pattern, token, purpose in KNOWN:
        if fnmatch(path.name, pattern) and all(token in line for line in lines):
            text = f"the file runs known code: {purpose}"
            return Finding(area=_AREA, subject=path.name, verdict=OK, text=text)
    shown = lines[0] if len(lines[0]) <= _MAX_SHOWN else f"{lines[0][: _MAX_SHOWN - 1]}…"
    owner = _owner(path)
    remedy = f"uninstall {owner}" if owner else f"delete {path}"
    return Finding(
        area=_AREA,
        subject=path.name,
        verdict=WARNING,
        text=f"{owner or 'a file of no installed package'} runs code at the start of every Python "
        f"process, in {len(lines)} lines. The first line is: {shown}",
        remedy=f"read {path}; if you do not want this code, {remedy}",
    )


def _owner(path: Path) -> str:
    """Return "name version" of the distribution that installed the file, or "" if it is unknown."""
    for distribution in distributions(path=[str(path.parent)]):
        record = distribution.read_text("RECORD") or ""
        if any(line.split(",")[0] == path.name for line in record.splitlines()):
            return f"{distribution.metadata['Name']} {distribution.version}"
    return ""
