"""Run the suites on one mutant in a child process.

The parent imports the heavy libraries but no module of the project, so that a child starts quickly
and imports the project with the mutant instead of the original module. A child that exceeds its
time limit is killed.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from importlib.machinery import ModuleSpec, SourceFileLoader
from itertools import chain
from types import CodeType, ModuleType

from mutation.targets import Target

SURVIVED, KILLED = 0, 1
MEMORY_BYTES = 8 << 30
POLL_S = 0.02


def try_mutant(tree: ast.Module, target: Target, root: str, limit_s: float) -> tuple[str, float]:
    """Return "killed", "survived" or "timeout", and the duration in seconds."""
    path = os.path.join(root, target.path)
    code = compile(tree, path, "exec")
    start_s = time.monotonic()
    child = os.fork()
    if not child:
        os._exit(_live(code, path, target))
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        took_s = time.monotonic() - start_s
        if ended:
            verdict = "survived" if status == SURVIVED else "killed"
            return verdict, took_s
        if took_s > limit_s:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "timeout", took_s
        time.sleep(POLL_S)


def _live(code: CodeType, path: str, target: Target) -> int:
    """Run the suites on the mutant in the child. Return the exit code."""
    try:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        silent = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(silent, stream)
        sys.meta_path.insert(0, _Finder(target.module, path, code))
        run_suites(target.suites)
    except BaseException:
        return KILLED
    return SURVIVED


def run_suites(suites: Sequence[tuple[str, str]]) -> None:
    """Run whole suites of the conformance kit. Raise an error for the first violated rule."""
    from dovetail_devkit.expectation import SkipCase
    from dovetail_devkit.kit import suite_cases
    from dovetail_devkit.kit_subjects import Subjects
    from dovetail_devkit.plugin_cases import make_registry

    registry, stack = make_registry(), ExitStack()
    subjects = Subjects(registry=registry, stack=stack)
    cases = (suite_cases(kind, registry.load(kind, name), subjects) for kind, name in suites)
    with stack:
        for case in chain.from_iterable(cases):
            with suppress(SkipCase):
                case.run()


class _Loader(SourceFileLoader):
    """An import loader of the mutant instead of the original module."""

    def __init__(self, name: str, path: str, code: CodeType) -> None:
        super().__init__(name, path)
        self._code = code

    def get_code(self, fullname: str) -> CodeType:
        return self._code


class _Finder:
    """An import finder for the mutated module only."""

    def __init__(self, module: str, path: str, code: CodeType) -> None:
        self._module = module
        self._loader = _Loader(module, path, code)
        self._path = path

    def find_spec(
        self, name: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._module:
            return None
        return importlib.util.spec_from_file_location(name, self._path, loader=self._loader)
