"""Tries faults in the wiring: changes one line of a copy of the code and expects a test to fail.

The parent imports the heavy libraries but no module of the project. Each trial is a fork that works
in a copy of the repository. The source directories of the copy come first on the path, also in
processes that a test starts. A trial that takes too long is killed.
"""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from preloading import import_libraries

ROOT = Path(__file__).resolve().parents[2]
FILE = Path(__file__).with_name("wiring_faults.toml")
MAX_TRIALS = 2
"""Number of trials that run at the same time."""
LIMIT_S = 120.0
POLL_S = 0.05
TESTS_FAILED = 1
"""Exit code of pytest when tests ran and some of them failed."""

_SKIPPED = (
    ".git",
    ".venv",
    ".bench",
    ".demo",
    ".gpu-bundle",
    "build",
    "dist",
    "*.egg-info",
    ".*_cache",
)


@dataclass(frozen=True, kw_only=True)
class WiringFault:
    """One fault: a description and a change of one file.

    feature: id of its row. name: a description. path: the file to change. right: a string that
    occurs once in the file. wrong: the replacement of `right`. test: node id of the linked test
    that must fail; may name one case.
    """

    feature: str
    name: str
    path: str
    right: str
    wrong: str
    test: str

    def problem(self, root: Path = ROOT) -> str:
        """Return why the fault cannot be tried, or ""."""
        file = root / self.path
        count = file.read_text("utf-8").count(self.right) if file.is_file() else 0
        if count == 1:
            return ""
        return (
            f"the fault {self.name!r} cannot be tried: {self.right!r} occurs {count} times in "
            f"{self.path}; update `right` to the line that does this now"
        )


def read_faults(file: Path = FILE) -> tuple[WiringFault, ...]:
    """Return the faults that `file` lists."""
    rows = tomllib.loads(file.read_text("utf-8"))["fault"]
    return tuple(WiringFault(**row) for row in rows)


def try_faults(faults: Iterable[WiringFault]) -> Iterator[tuple[WiringFault, str]]:
    """Yield each fault with the verdict of its test: "failed", "passed", "hung" or "broken".

    "broken" means that the test could not run. The faults are in the order in which their trials
    end.
    """
    import_libraries()
    with tempfile.TemporaryDirectory(prefix="dovetail-faults-") as folder, ExitStack() as cleanup:
        free = [Path(folder) / f"tree{number}" for number in range(MAX_TRIALS)]
        for tree in free:
            cleanup.callback(shutil.rmtree, bytecode_folder(tree), ignore_errors=True)
            copy_tree(tree)
        running: dict[int, tuple[WiringFault, Path, float]] = {}
        waiting = list(faults)[::-1]
        while waiting or running:
            while waiting and free:
                fault, tree = waiting.pop(), free.pop()
                running[_start(fault, tree)] = (fault, tree, time.monotonic())
            for child, verdict in _ended(running):
                fault, tree, _ = running.pop(child)
                _restore(fault, tree)
                free.append(tree)
                yield fault, verdict
            time.sleep(POLL_S)


def _ended(running: Mapping[int, tuple[WiringFault, Path, float]]) -> list[tuple[int, str]]:
    """Return the trials that have ended, each with its verdict."""
    now_s = time.monotonic()
    verdicts = (
        (child, _verdict(child, now_s - start_s)) for child, (_, _, start_s) in running.items()
    )
    return [(child, verdict) for child, verdict in verdicts if verdict]


def source_folders(tree: Path) -> list[str]:
    """Return the directories of the copy `tree` from which its members are imported."""
    patterns = ("core/src", "model_registry/src", "*/*/src")
    return sorted({str(path) for pattern in patterns for path in tree.glob(pattern)})


def copy_tree(tree: Path) -> None:
    """Copy the repository with its bytecode. The files are hard links until they are changed."""
    ignored = shutil.ignore_patterns(*_SKIPPED)
    shutil.copytree(ROOT, tree, ignore=ignored, copy_function=_link)
    compiled = bytecode_folder(ROOT)
    if compiled.is_dir():
        shutil.copytree(
            compiled, bytecode_folder(tree), ignore=ignored, copy_function=_link_if_present
        )


def bytecode_folder(folder: Path) -> Path:
    """Return the directory of the bytecode of `folder` below PYTHONPYCACHEPREFIX.

    Without this variable, the directory does not exist: the bytecode is next to the sources.
    """
    return Path(sys.pycache_prefix or "/nowhere", *folder.parts[1:])


def _link_if_present(source: str, target: str) -> None:
    """Link a file unless another process has just replaced it."""
    with suppress(FileNotFoundError):
        _link(source, target)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # the copy is on another file system
        shutil.copy2(source, target)


def _start(fault: WiringFault, tree: Path) -> int:
    """Change the file and fork. Return the child's process id."""
    text = (ROOT / fault.path).read_text("utf-8")
    _replace(tree / fault.path, text.replace(fault.right, fault.wrong, 1))
    child = os.fork()
    if not child:
        code = 3
        try:
            os.setsid()
            code = _run_test(fault.test, tree)
        finally:
            os._exit(code)
    return child


def _restore(fault: WiringFault, tree: Path) -> None:
    (tree / fault.path).unlink()
    _link(str(ROOT / fault.path), str(tree / fault.path))


def _replace(file: Path, text: str) -> None:
    """Write a new file, because the old one is a hard link into the repository."""
    file.unlink()
    file.write_text(text, "utf-8")


def _run_test(test: str, tree: Path) -> int:
    """Run one test in the copy `tree` without output, in the child. Return pytest's exit code."""
    log = os.open(tree / "trial.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.chdir(tree)
    folders = source_folders(tree)
    sys.path[:0] = folders
    os.environ["PYTHONPATH"] = os.pathsep.join(folders)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.pop("PYTEST_ADDOPTS", None)
    importlib.invalidate_caches()
    import pytest

    # -m "": the case that detects the fault may be one that this commit does not sample.
    arguments = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "", test]
    return int(pytest.main(arguments))


def _verdict(child: int, took_s: float) -> str:
    """Return the verdict of a trial, or "" while it runs."""
    ended, status = os.waitpid(child, os.WNOHANG)
    if not ended:
        if took_s < LIMIT_S:
            return ""
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return "hung"
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # processes that the test has started and not ended
    code = os.waitstatus_to_exitcode(status)
    return {0: "passed", TESTS_FAILED: "failed"}.get(code, "broken")
