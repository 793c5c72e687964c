"""Compiles the graphs that torch traces: passes, cache, splitting, and the compile backend."""

from __future__ import annotations

import copy
import json
import logging
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._guards import TracingContext, tracing
from torch.fx import GraphModule

from dovetail.errors import DovetailError, PluginError
from dovetail.interfaces import CompileBackend, CompileRequest
from dovetail.plugins.containment import describe_failure
from dovetail_torch.attention_table import AttentionTable
from dovetail_torch.compilation.code_cache import CodeCache
from dovetail_torch.compilation.graphs import (
    describe_graph,
    example_inputs_of,
    fake_mode_of,
)
from dovetail_torch.compilation.passes import NamedPass, apply_passes
from dovetail_torch.compilation.pieces import compile_pieces
from dovetail_torch.compilation.report import CompileReport

logger = logging.getLogger(__name__)

_KEY_VERSION = 1
Compiled = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class CompilePlan:
    """The level, and numbers of tokens with code of fixed shapes, from the engine's options.

    backend_name, passes: the plugins, as the user names them.
    """

    level: str
    backend_name: str
    sizes: tuple[int, ...] = ()
    passes: Sequence[NamedPass] = ()

    @property
    def is_split(self) -> bool:
        """Whether graphs are split at attention."""
        return self.level == "piecewise"


class GraphCompiler:
    """The backend that `torch.compile` calls. report: counts and times.

    error: the error of the last call that failed. torch raises another one in its place.
    """

    def __init__(
        self,
        plan: CompilePlan,
        backend: CompileBackend,
        table: AttentionTable,
        cache: CodeCache | None,
        folder: Path | None,
    ) -> None:
        """cache: None to keep no files. folder: the `cache_dir` of the backend."""
        self.report = CompileReport(
            level=plan.level, backend=plan.backend_name, cache="off" if cache is None else "miss"
        )
        self.error: DovetailError | None = None
        self._is_finished = False
        self._plan, self._backend, self._table = plan, backend, table
        self._cache, self._folder = cache, folder
        self._key: dict[str, Any] | None = None
        self._compiled: dict[str, Compiled] = {}

    def __call__(self, graph: GraphModule, example_inputs: Sequence[Any]) -> Compiled:
        """Return compiled code for a graph. Called by torch while it traces."""
        try:
            with self._after_start() if self._is_finished else nullcontext():
                return self._compile(graph, example_inputs_of(graph))
        except DovetailError as error:
            self.error = error
            raise

    @contextmanager
    def _after_start(self) -> Iterator[None]:
        """Count and report a compilation in a step. Raise PluginError if it is not allowed."""
        report = self.report
        where = f"compile_level={report.level!r} with compile_backend={report.backend!r}"
        if report.level != "as_is":
            raise PluginError(
                f"{where} recompiles during a step, which this level does not allow. Choose "
                "another compile_backend, or omit compile_level."
            )
        report.num_recompiled += 1
        logger.warning(
            "%s recompiles during a step, and all requests wait (compilation %d since the start). "
            "Set compile_level='once' or 'piecewise' to compile only at the start.",
            where,
            report.num_recompiled,
        )
        if self._folder is not None:
            self._folder.mkdir(mode=0o700)
        try:
            yield
        finally:
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)

    def finish(self) -> None:
        """Store the files of the backend in the cache, unless they were restored from it.

        Later compilations are reported, or are errors if the level does not allow them.
        """
        self._is_finished = True
        report = self.report
        if self._cache is None or self._folder is None or self._key is None:
            return
        if report.cache != "hit":
            report.cache_bytes = self._cache.store(self._key, self._folder)

    def _compile(self, graph: GraphModule, example_inputs: Sequence[Any]) -> Compiled:
        self.report.num_graphs += 1
        apply_passes(graph, self._plan.passes)
        self._restore(graph, example_inputs)
        general = self._compile_whole(graph, example_inputs, None)
        if not self._plan.sizes:
            return general
        by_size = {
            size: self._compile_whole(graph, _with_size(example_inputs, size), size)
            for size in self._plan.sizes
        }
        place = next(i for i, item in enumerate(example_inputs) if isinstance(item, torch.SymInt))

        def run(*inputs: Any) -> Any:
            return by_size.get(inputs[place], general)(*inputs)

        return run

    def _compile_whole(
        self, graph: GraphModule, example_inputs: Sequence[Any], size: int | None
    ) -> Compiled:
        def compile_piece(piece: GraphModule, inputs: Sequence[Any]) -> Compiled:
            return self._compile_piece(piece, inputs, size)

        # The backend may change the graph.
        own = GraphModule(graph, copy.deepcopy(graph.graph))
        with fake_mode_of(example_inputs):
            if self._plan.is_split:
                return compile_pieces(own, example_inputs, self._table, compile_piece)
            return compile_piece(own, example_inputs)

    def _compile_piece(
        self, graph: GraphModule, example_inputs: Sequence[Any], size: int | None
    ) -> Compiled:
        """Compile a graph, unless an equal one was compiled before."""
        description = f"{size} {describe_graph(graph, example_inputs)}"
        compiled = self._compiled.get(description)
        if compiled is not None:
            self.report.num_shared += 1
            return compiled
        request = CompileRequest(graph=graph, example_inputs=example_inputs, num_tokens=size)
        start_s = time.perf_counter()
        try:
            # Each piece has a context of its own: the backend keeps data of a graph in it.
            with tracing(TracingContext(fake_mode_of(example_inputs))):
                compiled = self._backend.compile(request)
        except Exception as error:
            raise PluginError(
                f"compile_backend={self._plan.backend_name!r} failed: {describe_failure(error)}. "
                "Choose another compile_backend, or omit compile_level."
            ) from error
        if not callable(compiled):
            raise PluginError(
                f"compile_backend={self._plan.backend_name!r} returned {compiled!r:.80}, which is "
                "not callable. Choose another compile_backend."
            )
        self.report.compile_s += time.perf_counter() - start_s
        self.report.num_compiled += 1
        self._compiled[description] = compiled
        return compiled

    def _restore(self, graph: GraphModule, example_inputs: Sequence[Any]) -> None:
        """Restore the files of the backend before it compiles the first graph."""
        if self._cache is None or self._folder is None or self._key is not None:
            return
        plan, backend = self._plan, self._backend
        try:
            backend_key = str(backend.cache_key())
            passes = [(item.name, str(item.graph_pass.cache_key())) for item in plan.passes]
        except Exception as error:
            raise PluginError(
                f"compile_backend={plan.backend_name!r} or a pass of compile_passes did not "
                f"return its cache key: {describe_failure(error)}. Correct it, or "
                "set compile_cache='off'."
            ) from error
        self._key = {
            "version": _KEY_VERSION,
            "torch": torch.__version__,
            "python": sys.version,
            "level": plan.level,
            "sizes": plan.sizes,
            "backend": [f"{type(backend).__module__}:{type(backend).__qualname__}", backend_key],
            "passes": passes,
            "graph": describe_graph(graph, example_inputs),
        }
        self._key = json.loads(json.dumps(self._key))
        restored = self._cache.restore(self._key, self._folder)
        self.report.cache, self.report.cache_bytes = restored.state, restored.num_bytes


def _with_size(example_inputs: Sequence[Any], size: int) -> list[Any]:
    """Return the example inputs for `size` tokens. The token count is the only symbolic size."""
    inputs: list[Any] = []
    for item in example_inputs:
        if isinstance(item, torch.SymInt):
            inputs.append(size)
        elif isinstance(item, torch.Tensor) and any(
            isinstance(length, torch.SymInt) for length in item.shape
        ):
            shape = [size if isinstance(length, torch.SymInt) else length for length in item.shape]
            with fake_mode_of(example_inputs):
                inputs.append(torch.empty(shape, dtype=item.dtype, device=item.device))
        else:
            inputs.append(item)
    return inputs
