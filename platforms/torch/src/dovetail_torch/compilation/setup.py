"""Prepares the compilation of a worker's model from its configuration, and runs it."""

from __future__ import annotations

import logging
import random
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import numpy as np
import torch

from dovetail.config.user_paths import user_path
from dovetail.errors import ConfigError
from dovetail.interfaces import CompileBackend, CompileContext, GraphPassContext, WorkerContext
from dovetail.plugins.construction import construct
from dovetail.plugins.resolving.reference import reference_text
from dovetail.plugins.selection import AUTO, choose
from dovetail_torch.attention_table import AttentionTable
from dovetail_torch.cache_folder import CacheFolder, user_cache_folder
from dovetail_torch.compilation.code_cache import ENDING, MAX_FOLDER_BYTES, CodeCache
from dovetail_torch.compilation.compiled_model import CompiledModel
from dovetail_torch.compilation.compiler import CompilePlan, GraphCompiler
from dovetail_torch.compilation.passes import NamedPass
from dovetail_torch.compilation.report import CompileReport
from dovetail_torch.runner.loaded_model import LoadedModel

logger = logging.getLogger(__name__)

CACHE_NAME = "compiled"
OFF = "off"
_TRACED_TOKENS = 13
"""Number of tokens of the step that is traced. It differs from the usual sizes in models."""
_OTHER_TOKENS = (6, 1)
"""Numbers of tokens that are compiled and compared too: one token is special for compilers."""

RunSizes = Callable[[Sequence[int]], None]
"""Runs one step of each number of tokens."""


class Compilation:
    """The compilation of one model. model: the compiled model, for the runner."""

    def __init__(
        self, model: CompiledModel, compiler: GraphCompiler, plan: CompilePlan, folder: Path | None
    ) -> None:
        """folder: the backend's directory, deleted after compilation."""
        self.model = model
        self._compiler, self._plan, self._folder = compiler, plan, folder

    @property
    def report(self) -> CompileReport:
        """Counts and times."""
        return self._compiler.report

    def run(self, run_sizes: RunSizes, device: torch.device) -> None:
        """Compile by running steps, compare their results, and store the code in the cache.

        The state of random generators is preserved. Raises ConfigError if the model cannot be
        compiled, and PluginError for a failure of the backend or a pass.
        """
        start_s = time.perf_counter()
        self.model.is_checking = True
        if self._folder is not None:
            self._folder.mkdir(mode=0o700)
        try:
            with _preserved_random_state(device):
                run_sizes((_TRACED_TOKENS, *_OTHER_TOKENS, *self._plan.sizes))
            self._compiler.finish()
        finally:
            self.model.is_checking = False
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
        self.report.trace_s = time.perf_counter() - start_s - self.report.compile_s
        logger.info("%s", self.report)


def make_compilation(
    context: WorkerContext, loaded: LoadedModel, table: AttentionTable, failure_reason: str
) -> Compilation | None:
    """Return the compilation of a loaded model, or None without a compile level.

    failure_reason: why the model cannot be compiled, or "". Raises ConfigError with this
    reason, and the errors of plugins that cannot be used.
    """
    compute, device, dtype = context.config.compute, loaded.limits.device, loaded.limits.dtype
    if compute.compile_level == "none":
        return None
    if failure_reason:
        raise ConfigError(f"compile_level={compute.compile_level!r}: {failure_reason}.")
    plugins = context.plugins
    reference = compute.compile_backend or AUTO
    cls = choose(plugins, context.platform, "compile_backend", reference)
    if device.type not in (cls.device_types or {device.type}):
        raise ConfigError(
            f"compile_backend: {cls.__name__} supports {', '.join(sorted(cls.device_types))}, but "
            f"the device is {device.type}. Choose another compile_backend."
        )
    passes = []
    for pass_reference in compute.compile_passes:
        pass_cls = plugins.load("graph_pass", pass_reference)
        options = plugins.options_of("graph_pass", pass_cls)
        pass_context = GraphPassContext(device=device, dtype=dtype, options=options)
        graph_pass = construct("graph_pass", pass_cls, pass_context)
        passes.append(NamedPass(name=reference_text(pass_reference), graph_pass=graph_pass))
    cache = _make_cache(compute.compile_cache)
    folder = None
    if cache is not None:  # created in `run`, so that a failed start leaves no directory
        folder = Path(tempfile.gettempdir()) / f"dovetail-compile-{secrets.token_hex(8)}"
    options = plugins.options_of("compile_backend", cls)
    backend_context = CompileContext(device=device, dtype=dtype, cache_dir=folder, options=options)
    backend = cast(CompileBackend, construct("compile_backend", cls, backend_context))
    resolution = plugins.resolution_of("compile_backend", cls) if reference == AUTO else None
    plan = CompilePlan(
        level=compute.compile_level,
        backend_name=reference_text(reference) if resolution is None else resolution.name,
        sizes=compute.compile_sizes,
        passes=passes,
    )
    compiler = GraphCompiler(plan, backend, table, cache, folder)
    return Compilation(CompiledModel(loaded.model, table, compiler), compiler, plan, folder)


def _make_cache(option: str | None) -> CodeCache | None:
    if option == OFF:
        return None
    try:
        path = (
            user_cache_folder(CACHE_NAME) if option is None else user_path("compile_cache", option)
        )
    except RuntimeError:  # no home directory
        return None
    folder = CacheFolder(path=path.absolute(), max_bytes=MAX_FOLDER_BYTES, ending=ENDING)
    return CodeCache(folder, is_required=option is not None)


@contextmanager
def _preserved_random_state(device: torch.device) -> Iterator[None]:
    """Restore the random state of Python, numpy, torch and the device after the block."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    module = getattr(torch, device.type, None)
    devices = [device.index or 0] if hasattr(module, "get_rng_state") else []
    try:
        with torch.random.fork_rng(devices, device_type=device.type):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
