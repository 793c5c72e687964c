"""A virtual environment that contains only given wheels and their declared dependencies.

Nothing is downloaded: the third-party packages, which follow from the metadata of the wheels, are
links into the environment that runs the tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def run(*command: object, cwd: Path | None = None) -> str:
    """Run a command and return its output. Raise AssertionError with the output if it fails."""
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def make_environment(folder: Path, wheels: Iterable[Path], *, tools: Iterable[str] = ()) -> Path:
    """Create an environment in `folder` and return its interpreter.

    tools: distributions to add to the dependencies of the wheels.
    """
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    interpreter = folder / "bin/python"
    run(*PIP, "--python", interpreter, "install", "-q", "--no-index", "--no-deps", *wheels)
    (site_packages,) = (folder / "lib").glob("python*/site-packages")
    installed = [Distribution.at(path) for path in site_packages.glob("*.dist-info")]
    here = {canonicalize_name(item.name) for item in installed}
    names = [requirement for item in installed for requirement in _dependencies(item)] + list(tools)
    for needed in _closure(names, here):
        _link(needed, site_packages)
        _link_programs(needed, interpreter.parent)
    return interpreter


def _closure(names: Iterable[str], known: set[str]) -> Iterator[Distribution]:
    """Yield each required distribution once. Distributions in `known` are already installed."""
    waiting = [canonicalize_name(name) for name in names]
    seen = set(known)
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            actual = distribution(name)
        except PackageNotFoundError:
            continue  # optional on this machine, such as a library of an accelerator
        yield actual
        waiting += [canonicalize_name(requirement) for requirement in _dependencies(actual)]


def _dependencies(first: Distribution) -> Iterator[str]:
    """Yield the names of a distribution's dependencies on this machine, without those of extras."""
    for text in first.requires or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement.name


def _link(first: Distribution, site_packages: Path) -> None:
    tops = {file.parts[0] for file in first.files or () if file.parts[0] not in ("..", ".")}
    for top in tops - {"__pycache__"}:
        source, link = Path(str(first.locate_file(top))), site_packages / top
        if source.exists() and not link.exists():
            link.symlink_to(source)
            _link_bytecode(source, link)


def _link_bytecode(source: Path, link: Path) -> None:
    """With PYTHONPYCACHEPREFIX, Python finds the compiled modules of `source` below `link`."""
    if sys.pycache_prefix is None or not source.is_dir():
        return
    compiled, alias = (Path(sys.pycache_prefix, *path.parts[1:]) for path in (source, link))
    compiled.mkdir(parents=True, exist_ok=True)
    alias.parent.mkdir(parents=True, exist_ok=True)
    if not os.path.lexists(alias):
        alias.symlink_to(compiled)


def _link_programs(first: Distribution, folder: Path) -> None:
    """Link binaries, such as ruff. Scripts would run in the environment of the tests."""
    for file in first.files or ():
        if file.parts[0] != ".." or file.parent.name != "bin":
            continue
        source = Path(str(first.locate_file(file))).resolve()
        link = folder / source.name
        if source.is_file() and not link.exists() and source.read_bytes()[:2] != b"#!":
            link.symlink_to(source)
