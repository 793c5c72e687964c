"""Collects the wheels that `check.py` needs on a GPU machine without a network: `make gpu-bundle`.

    python bench/gpu/bundle.py [--python 3.12] [--into .gpu-bundle]

The bundle contains the wheels of the members, and every third-party wheel that they need and that
such a machine lacks. Versions follow `requirements/constraints.txt` or, for indirect dependencies,
the versions installed here, which were tested. torch, Triton, numpy and transformers must be
installed on the machine. Members with native code for the CPU, and members that depend on them, are
omitted. pip on the target machine resolves no versions, because the bundle has one version of each
package.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

from gpu.bundle_contents import BUNDLE, INDEX  # noqa: E402

MAX_BYTES = 60 * 10**6
NATIVE = frozenset({"dovetail-cpu-kernels"})
PROVIDED = frozenset(
    {"torch", "triton", "numpy", "transformers", "tokenizers", "safetensors", "huggingface-hub"}
)
"""Packages that the GPU machine has in builds for its GPU, and those that they restrict to certain
versions. The bundle must not replace them."""
TOOLS = ("pytest",)
_PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
    "manylinux_2_31_x86_64",
)
"""Accepted platform tags of wheels, the preferred one first. llguidance has only the last one."""
_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def members() -> dict[str, Path]:
    """Return the directories of the members in the bundle, by the name of their distribution."""
    lines = (ROOT / "requirements" / "dev.txt").read_text("utf-8").splitlines()
    folders = [ROOT / line.removeprefix("-e ./") for line in lines if line.startswith("-e ./")]
    projects = {_project(folder)["name"]: folder for folder in folders}
    staying = set(NATIVE)
    while more := {
        name
        for name, folder in projects.items()
        if name not in staying and staying & set(_names(_project(folder)["dependencies"]))
    }:
        staying |= more
    return {name: folder for name, folder in projects.items() if name not in staying}


def needed(bundled: dict[str, Path], python: str) -> dict[str, str]:
    """Return the third-party distributions that members need on the target, with versions."""
    projects = [_project(folder) for folder in bundled.values()]
    requirements = [item for project in projects for item in project["dependencies"]]
    waiting = [*_names(requirements, python), *TOOLS]
    pins = _pins()
    needed_files: dict[str, str] = {}
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in needed_files or name in PROVIDED or name in bundled:
            continue
        here = distribution(name)
        needed_files[name] = pins.get(name, here.version)
        waiting += _names(here.requires or (), python)
    return needed_files


def _project(folder: Path) -> dict[str, Any]:
    table = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))
    project: dict[str, Any] = table["project"]
    return project


def _names(requirements: Iterable[str], python: str = "3.12") -> Iterator[str]:
    """Yield the names of the requirements that apply to this Python on Linux, without extras."""
    there = {
        "extra": "",
        "python_version": python,
        "python_full_version": f"{python}.0",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "os_name": "posix",
    }
    for text in requirements:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate(there):
            yield canonicalize_name(requirement.name)


def _pins() -> dict[str, str]:
    text = (ROOT / "requirements" / "constraints.txt").read_text("utf-8")
    return {canonicalize_name(n): v for n, v in re.findall(r"^([\w.-]+)==(\S+)$", text, re.M)}


def gather(into: Path, python: str) -> dict[str, Any]:
    """Fill an empty directory and return its index. Raises CalledProcessError if pip fails."""
    bundled = members()
    if bundled:
        options = ("--no-deps", "--no-build-isolation", "--wheel-dir", str(into))
        _run(*_PIP, "wheel", "-q", *map(str, bundled.values()), *options)
    expected = needed(bundled, python)
    platforms = [word for item in _PLATFORMS for word in ("--platform", item)]
    options = ("--no-deps", "--only-binary=:all:", "--python-version", python)
    exact = [f"{name}=={version}" for name, version in sorted(expected.items())]
    _run(
        *_PIP, "download", "-q", *options, "--implementation", "cp", *platforms, "-d", into, *exact
    )
    files = {
        path.name: {
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in sorted(into.glob("*.whl"))
    }
    commit = _run("git", "rev-parse", "--short=10", "HEAD").strip()
    changed = _run("git", "status", "--porcelain", "--untracked-files=no").strip()
    index = {"commit": commit + ("+" if changed else ""), "python": python, "files": files}
    (into / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return index


def _run(*command: object) -> str:
    words = list(map(str, command))
    return subprocess.run(words, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> int:
    """Create the bundle and print its size. Return 1 if it is too large."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--python", default="3.12", help="Python version of the target machine")
    parser.add_argument("--into", type=Path, default=ROOT / BUNDLE)
    args = parser.parse_args()
    shutil.rmtree(args.into, ignore_errors=True)
    args.into.mkdir(parents=True)
    index = gather(args.into, args.python)
    num_bytes = sum(item["bytes"] for item in index["files"].values())
    summary = f"{len(index['files'])} wheels, {num_bytes / 1e6:.1f} MB"
    print(f"{args.into}: {summary}, of commit {index['commit']}")
    if num_bytes > MAX_BYTES:
        print(f"The limit is {MAX_BYTES / 1e6:.0f} MB.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
