"""Selects what is prepared: packed weights, or memory for them, and torch's libraries."""

from __future__ import annotations

import importlib
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.errors import ConfigError, DovetailError
from dovetail.machine import read_memory
from dovetail.processes.affinity import allowed_cpus
from dovetail_cpu.native_library import find_library, probe_fast
from dovetail_cpu.options import CPUWorkerOptions
from dovetail_cpu.packed_cache.folder import chosen_folder
from dovetail_cpu.packed_cache.prefetch import PackedPrefetch, find_packed
from dovetail_cpu.preparation.torch_libraries import preload_torch
from dovetail_torch.weights.checkpoint_files import find_weight_files

if TYPE_CHECKING:
    from dovetail.config import RequestedConfig
    from dovetail_cpu.native_memory import NativeMemory
    from dovetail_cpu.preparation.early_memory import EarlyMemory

_OPTION_KEYS = ("cpu", "worker:cpu", "dovetail_cpu.worker:CPUWorker")
"""The keys of the worker's options in `plugin_options`."""
_MAX_THREADS = 4
"""Maximum number of threads that verify packed weights, while another core imports torch."""
_MIN_EARLY_BYTES = 64 << 20
_MEMORY_SHARE = 0.5
"""Memory is allocated early if the weights need at most this share of the available memory."""
_BFLOAT16 = "bfloat16"


class Preparation:
    """The work for one engine. The worker uses the results, and then calls `cancel`.

    prefetch: the packed weights that are being verified, or None.
    """

    def __init__(self, config: RequestedConfig) -> None:
        """Start the threads. Return immediately."""
        self.prefetch: PackedPrefetch | None = None
        self._memory: EarlyMemory | None = None
        if config.load.load_format in ("auto", "safetensors", "gguf"):
            self._prepare_weights(config)
        # While torch's libraries are loaded, extension modules and other libraries wait.
        if not config.model.skip_tokenizer_init:
            importlib.import_module("tokenizers")
        find_library()
        preload_torch()

    def take_memory(self) -> NativeMemory | None:
        """Return zeroed memory that is probably large enough for the packed weights, or None."""
        memory, self._memory = self._memory, None
        return None if memory is None else memory.take()

    def cancel(self) -> None:
        """Stop the threads, and release what was not taken."""
        if self.prefetch is not None:
            self.prefetch.cancel()
        self.take_memory()

    def _prepare_weights(self, config: RequestedConfig) -> None:
        keys = [key for key in _OPTION_KEYS if key in config.plugin_options]
        try:
            options = CPUWorkerOptions(**(config.plugin_options[keys[0]] if keys else {}))
            folder, model_dir = chosen_folder(options), config.model.model_dir
        except (TypeError, ValueError, ConfigError):
            return  # reported when the worker is loaded
        file = None
        if folder is not None and os.path.isdir(folder.path):
            file = find_packed(folder, model_dir)
        if file is not None:
            num_threads = max(1, min(_MAX_THREADS, len(allowed_cpus()) - 1))
            self.prefetch = PackedPrefetch(file, num_threads=num_threads)
        elif _is_packed_in_bfloat16(config):
            self._memory = _early_memory(model_dir)


def _is_packed_in_bfloat16(config: RequestedConfig) -> bool:
    """Return whether packed weights have about the size of the files."""
    stated = config.model.hf_config
    stored = stated.get("dtype", stated.get("torch_dtype"))
    return (
        stored == _BFLOAT16
        and config.model.dtype in ("auto", _BFLOAT16)
        and config.compute.linear_method in ("auto", "native")
        and not config.model.quantization
        and probe_fast().usable
    )


def _early_memory(model_dir: Path) -> EarlyMemory | None:
    """Start to allocate memory of the size of the weight files, unless they are too large."""
    from dovetail_cpu.preparation.early_memory import EarlyMemory  # needs the native kernels

    memory = read_memory()
    # RuntimeError: the limit on threads may be reached.
    with suppress(DovetailError, OSError, RuntimeError):
        num_bytes = sum(path.stat().st_size for path in find_weight_files(model_dir))
        available = min(memory.get("available", 0), memory.get("limit", 1 << 62))
        if _MIN_EARLY_BYTES <= num_bytes <= _MEMORY_SHARE * available:
            return EarlyMemory(num_bytes)
    return None
