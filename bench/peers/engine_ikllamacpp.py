"""Runs ik_llama.cpp, a fork of llama.cpp with other CPU kernels, through `ik_bridge.c`.

Steps and batches are those of `engine_llamacpp.py`. All requests share one KV cache, because
ik_llama.cpp has no separate streams.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping
from typing import Any

from peers.engine_llamacpp import MAX_BATCH_TOKENS, LlamaCppEngine
from peers.serving import serve_engine

_DEFAULTS: Mapping[str, Any] = {
    "bridge": "libik_bridge.so",
    "repack": True,
    "merge_qkv": True,
    "flash": True,
    "cache_type": -1,
    "keep_prefix": False,
}

_HANDLE, _INT = ctypes.c_void_p, ctypes.c_int32
_LOG_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_FUNCTIONS: Mapping[str, tuple[Any, list[Any]]] = {
    "bridge_load": (_HANDLE, [ctypes.c_char_p, _INT, _INT]),
    "bridge_create_context": (_HANDLE, [_HANDLE, *[_INT] * 5]),
    "bridge_decode": (_INT, [_HANDLE, _INT, *[_HANDLE] * 4]),
    "llama_backend_init": (None, []),
    "llama_free": (None, [_HANDLE]),
    "llama_get_logits_ith": (ctypes.POINTER(ctypes.c_float), [_HANDLE, _INT]),
    "llama_kv_cache_clear": (None, [_HANDLE]),
    "llama_kv_cache_seq_rm": (ctypes.c_bool, [_HANDLE, _INT, _INT, _INT]),
    "llama_log_set": (None, [_LOG_CALLBACK, _HANDLE]),
    "llama_n_vocab": (_INT, [_HANDLE]),
    "llama_print_system_info": (ctypes.c_char_p, []),
}
"""Maps a function to the types of its result and its arguments."""


class IkLlamaCppEngine(LlamaCppEngine):
    """One model. One context at a time, sized for the current requests."""

    def load(self, model: str, weights: str, threads: int, options: Mapping[str, Any]) -> None:
        """Load a GGUF file. The converter has already quantized its weights.

        options: bridge (the path of the library of `ik_bridge.c`); repack, merge_qkv and flash
        (booleans, by default true) and cache_type (a ggml_type), which `ik_bridge.c` describes;
        keep_prefix (`generate`). Raises ValueError for another option, OSError without a bridge.
        """
        import numpy

        settings = {**_DEFAULTS, **options}
        if unknown := sorted(settings.keys() - _DEFAULTS.keys()):
            raise ValueError(f"unknown options {unknown}; choose from {sorted(_DEFAULTS)}")
        self._native = native = _library(settings["bridge"])
        self._numpy, self._threads = numpy, threads
        self._keeps_prefix, self._settings = settings["keep_prefix"], settings
        self._kept: list[int] = []
        self._quiet = _LOG_CALLBACK(lambda level, text, data: None)
        native.llama_log_set(self._quiet, None)
        native.llama_backend_init()
        begin = time.perf_counter()
        self._model = native.bridge_load(model.encode(), settings["repack"], settings["merge_qkv"])
        self.weights_s = time.perf_counter() - begin
        if not self._model:
            raise RuntimeError(f"ik_llama.cpp could not load {model}")
        self._vocab_size = native.llama_n_vocab(self._model)
        self._context: Any = None
        self._room = (0, 0)
        self._make_batch()

    def versions(self) -> dict[str, str]:
        """Return the instruction sets of the library."""
        system = self._native.llama_print_system_info().decode().strip(" |")
        return {"ik_llama.cpp for": system[:300]}

    def _create_context(self, num_streams: int, stream_size: int) -> Any:
        flash, cache_type = self._settings["flash"], self._settings["cache_type"]
        return self._native.bridge_create_context(
            self._model, num_streams, stream_size, self._threads, flash, cache_type
        )

    def _shorten_cache(self, num_kept: int) -> None:
        if num_kept:
            self._native.llama_kv_cache_seq_rm(self._context, 0, num_kept, -1)
        else:
            self._native.llama_kv_cache_clear(self._context)

    def _make_batch(self) -> None:
        """Create the columns of the batch once."""
        numpy = self._numpy
        self._tokens = numpy.zeros(MAX_BATCH_TOKENS, numpy.int32)
        self._positions, self._rows = self._tokens.copy(), self._tokens.copy()
        self._samples = numpy.zeros(MAX_BATCH_TOKENS, numpy.int8)

    def _decode(self, num_tokens: int) -> int:
        columns = (self._tokens, self._positions, self._rows, self._samples)
        addresses = (column.ctypes.data for column in columns)
        code: int = self._native.bridge_decode(self._context, num_tokens, *addresses)
        return code


def _library(path: str) -> ctypes.CDLL:
    """Load the bridge, which loads ik_llama.cpp. Raises OSError if a library is missing."""
    library = ctypes.CDLL(path)
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


if __name__ == "__main__":
    serve_engine(IkLlamaCppEngine())
