"""The compile backends of this package: `inductor`, torch's compiler, and `eager`."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from dovetail.interfaces import CompileBackend, CompileContext, CompileRequest

_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_TRITON_VARIABLE = "TRITON_CACHE_DIR"


class EagerBackend(CompileBackend):
    """Compiles nothing: runs the operations of the graph one by one. For tests and debugging."""

    def __init__(self, context: CompileContext) -> None:
        """Create the backend."""

    def compile(self, request: CompileRequest) -> Callable[..., Any]:
        """Return the forward function of the graph."""
        forward: Callable[..., Any] = request.graph.forward
        return forward

    def cache_key(self) -> str:
        """Return the version of torch."""
        return str(torch.__version__)


class InductorBackend(CompileBackend):
    """Compiles with torch's Inductor: C++ for the host, Triton for other devices.

    Inductor's own cache is in `cache_dir`, so compiled code is found there by the hash of a graph.
    """

    def __init__(self, context: CompileContext) -> None:
        """Store the directory of the cache."""
        self._cache_dir = context.cache_dir
        self._is_new = True

    def compile(self, request: CompileRequest) -> Callable[..., Any]:
        """Return compiled code."""
        with self._folder(), warnings.catch_warnings():
            # torch's own code calls deprecated torch functions.
            warnings.simplefilter("ignore", DeprecationWarning)
            # Imported here, because it takes a second.
            from torch._inductor.compile_fx import compile_fx

            compiled: Callable[..., Any] = compile_fx(
                request.graph,
                list(request.example_inputs),
                config_patches={"fx_graph_cache": self._cache_dir is not None},
            )
        return compiled

    def cache_key(self) -> str:
        """Return the versions, the properties of the processor and the number of threads."""
        parts = (
            torch.__version__,
            torch.__config__.show(),
            sys.version,
            platform.machine(),
            _processor_flags(),
            # The number of threads is a constant in the compiled loops.
            torch.get_num_threads(),
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    @contextmanager
    def _folder(self) -> Iterator[None]:
        """Let Inductor write to `cache_dir`, or to a directory that is deleted afterwards."""
        if self._is_new:
            from torch._inductor.utils import clear_caches

            # Code of earlier engines of this process would be missing in the directory.
            clear_caches()
            self._is_new = False
        with tempfile.TemporaryDirectory(prefix="dovetail-") as spare:
            folder = self._cache_dir or Path(spare)
            with _environment(
                {_CACHE_VARIABLE: str(folder), _TRITON_VARIABLE: str(folder / "triton")}
            ):
                yield


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables in the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _processor_flags() -> str:
    """Return the features of the processor as the system reports them, or ""."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    names = ("flags", "Features", "model name")
    return "\n".join(dict.fromkeys(line for line in text.splitlines() if line.startswith(names)))
