"""The CPU worker: the torch worker on the CPU platform's runtime.

In addition it caches packed weights between starts, restricts torch to one thread while native
kernels use the cores, replays recorded steps, and allocates the pages of the KV cache only
when they are used.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, cast

import torch
from pydantic import BaseModel
from torch import nn

from dovetail.interfaces import WeightLoader, WorkerContext
from dovetail.plan import SchedulerOutput
from dovetail_cpu.mapped_pages import forget_pages, release_free_memory
from dovetail_cpu.native_ops import NativeOps
from dovetail_cpu.options import CPUWorkerOptions
from dovetail_cpu.packed_cache.cache import PackedCache
from dovetail_cpu.packed_cache.folder import chosen_folder
from dovetail_cpu.packed_cache.prefetch import weight_files
from dovetail_cpu.page_supply import PageSupply
from dovetail_cpu.platform import CPUPlatform
from dovetail_cpu.runtime import CPURuntime, lazy_zeros
from dovetail_torch.graph_provider import GraphProvider
from dovetail_torch.layers.embedding import VocabParallelEmbedding
from dovetail_torch.layers.linear import linear_layers, pack_linears
from dovetail_torch.weights.block_plan import BLOCK_PLAN, PlansBlocks
from dovetail_torch.weights.fingerprint import FINGERPRINT, Fingerprinted
from dovetail_torch.weights.finiteness import check_finite
from dovetail_torch.worker import TorchWorker

if TYPE_CHECKING:
    from dovetail_cpu.preparation.preparation import Preparation

logger = logging.getLogger(__name__)

_MIB = 1 << 20
_MAX_READY_BYTES = 128 << 20
"""Maximum number of bytes of the KV cache that are allocated ahead of use."""
_STEPS_AHEAD = 4
"""Number of full steps for which pages are allocated ahead."""


class CPUWorker(TorchWorker):
    """Runs the model on the cores that this process may use."""

    device_types: ClassVar[frozenset[str]] = frozenset({"cpu"})
    options_model: ClassVar[type[BaseModel]] = CPUWorkerOptions

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._cache: PackedCache | None = None
        self._is_restored = False
        self._is_native = False
        self._has_run = False
        self._pages = PageSupply((), 0)

    def init_device(self) -> None:
        """Set up this worker's threads and memory: its part of the engine's cores and memory."""
        cast(CPURuntime, self._runtime).num_sharing = self._context.world_size
        super().init_device()

    def load_weights(self, model: nn.Module, loader: WeightLoader) -> int:
        """Load and pack the weights. Cached packed weights are mapped instead."""
        runtime = cast(CPURuntime, self._runtime)
        if BLOCK_PLAN in getattr(loader, "provides", ()):
            cast(PlansBlocks, loader).plan(model)
        platform = self._context.platform
        prepared = platform.take_preparation() if isinstance(platform, CPUPlatform) else None
        self._cache = _make_cache(
            self._options(), model, loader, self._context.config.model.model_dir
        )
        if self._cache is not None:
            self._is_restored = self._cache.restore(
                num_threads=runtime.num_threads,
                prefetch=None if prepared is None else prepared.prefetch,
            )
        if prepared is not None:
            if not self._is_restored:
                _use_memory(model, prepared)
            prepared.cancel()
        num_bytes = loader.load(model)
        if not self._is_restored:
            # Cached weights were checked when they were packed.
            check_finite(model)
        pack_linears(model)
        for module in model.modules():
            if isinstance(module, VocabParallelEmbedding) and module.is_mapped:
                forget_pages(module.weight)
        release_free_memory()
        layers = [layer for _, layer in linear_layers(model)]
        self._is_native = any(getattr(layer, "kernel", None) is not None for layer in layers)
        if self._is_native:
            runtime.leave_cores_to_team()
        return num_bytes

    def graph_provider(self) -> GraphProvider | None:
        """Return the provider that records and replays native operations.

        None if torch computes the matrix products, or if a step contains collective operations.
        """
        if not self._is_native:
            return None
        if self._context.world_size > 1:
            logger.info("Steps are not replayed: each step contains collective operations.")
            return None
        # Imported here because it needs the native kernels.
        from dovetail_cpu.replay import ReplayProvider

        return ReplayProvider()

    def compile_failure_reason(self) -> str:
        """Return why torch.compile cannot be used: native kernels are not torch operators.

        "" if it can.
        """
        uses = []
        if self._is_native:
            uses.append("the linear method (use linear_method='onednn' or 'torch')")
        # For other dtypes the native ops are torch's.
        if self._limits.dtype == torch.bfloat16 and isinstance(self._ops.provider, NativeOps):
            uses.append("the ops (use ops='torch')")
        if not uses:
            return ""
        return (
            f"torch.compile cannot trace the native kernels of {' and '.join(uses)}. Native steps "
            "are recorded and replayed instead; omit compile_level to use them"
        )

    def determine_available_memory(self) -> int:
        """Return the unused part of the worker's memory, limited by the free address space.

        The cache reserves its whole address space immediately, but uses memory only when it is
        written.
        """
        left = super().determine_available_memory()
        self._has_run = True
        return min(left, cast(CPURuntime, self._runtime).address_space_left_bytes() // 2)

    def zeros(self, num_bytes: int) -> torch.Tensor:
        """Return zeroed memory whose pages are allocated on first write."""
        return lazy_zeros(num_bytes)

    def compile_or_warm_up_model(self) -> None:
        """Run the model once, then write the packed weights, or move them, in the background.

        The run that measured the memory of a step is sufficient, unless the model is compiled.
        """
        self._pages = PageSupply(self._runner.cache_pages, self._ready_bytes())
        self._pages.use(0)
        if self._compilation is not None or not self._has_run:
            super().compile_or_warm_up_model()
        if self._cache is not None and not self._is_restored:
            self._cache.save()
        elif self._cache is not None and self._options().packed_cache_huge_pages:
            self._cache.move_to_huge_pages(self._context.world_size)

    def execute_model(self, plan: SchedulerOutput) -> None:
        """Run the model, and allocate pages of the cache for the next steps."""
        for grown in plan.blocks:
            if grown.rows:
                self._pages.use(max(grown.block_ids))
        super().execute_model(plan)

    def _ready_bytes(self) -> int:
        """Return how many bytes of the cache to allocate ahead: enough for a few full steps."""
        limits, block_size = self._limits, self._context.config.cache.block_size
        num_blocks = -(-limits.max_num_batched_tokens // block_size) + limits.max_num_seqs
        block_bytes = sum(pages_NP.stride(0) for pages_NP in self._runner.cache_pages)
        return min(_MAX_READY_BYTES, _STEPS_AHEAD * num_blocks * block_bytes)

    def shutdown(self) -> None:
        """Free weights and cache, after the packed weights are written."""
        cast(CPURuntime, self._runtime).release()
        self._pages.close()
        if self._cache is not None:
            self._cache.wait()
        self._cache = None
        super().shutdown()

    def _options(self) -> CPUWorkerOptions:
        """Return this worker's options. A subclass may use a model with more options."""
        own = CPUWorkerOptions.model_fields.keys() & self._context.options.keys()
        return CPUWorkerOptions(**{name: self._context.options[name] for name in own})


def _use_memory(model: nn.Module, prepared: Preparation) -> None:
    """Let the model's native linear method pack the weights into the prepared memory, if any."""
    memory = prepared.take_memory()
    if memory is None:
        return
    # Imported here because it needs the native kernels.
    from dovetail_cpu.native_linear import NativeLinearMethod

    methods = {id(layer.linear_method): layer.linear_method for _, layer in linear_layers(model)}
    native = [method for method in methods.values() if isinstance(method, NativeLinearMethod)]
    if len(native) == 1:
        native[0].use_memory(memory)


def _make_cache(
    options: CPUWorkerOptions, model: nn.Module, loader: WeightLoader, model_dir: Path
) -> PackedCache | None:
    """Return this model's cache entry, or None if nothing is cached."""
    folder = chosen_folder(options)
    if folder is None or FINGERPRINT not in getattr(loader, "provides", ()):
        return None
    return PackedCache(
        folder,
        model,
        cast(Fingerprinted, loader).fingerprint(),
        files=weight_files(model_dir),
        min_bytes=options.packed_cache_min_mib * _MIB,
    )
