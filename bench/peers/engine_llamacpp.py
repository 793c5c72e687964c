"""Runs llama.cpp through the C API of llama-cpp-python, with continuous batching in this module.

A step contains, as in llama-server, the next token of each running request, then chunks of prompts
up to the batch size. Each request has its own KV stream.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from peers.serving import serve_engine

MAX_BATCH_TOKENS, MAX_MICRO_BATCH = 2048, 512
CONTEXT_GRANULE = 256
"""The size of a stream is rounded up to a multiple of this, as in llama.cpp."""


@dataclass
class Stream:
    """One running request. row: its KV stream.

    num_done: number of its prompt tokens in the cache.
    """

    row: int
    prompt: list[int]
    num_wanted: int
    num_done: int = 0
    tokens: list[int] = field(default_factory=list)


class LlamaCppEngine:
    """One model. One context at a time, sized for the current requests."""

    def load(self, model: str, weights: str, threads: int, options: Mapping[str, Any]) -> None:
        """Load a GGUF file. The converter has already quantized its weights.

        options: fields of the model parameters or of the context parameters, keep_prefix
        (`generate`), or backend: the path of a CPU backend that is a separate library.
        """
        import llama_cpp.llama_cpp as native
        import numpy

        self._native, self._numpy, self._threads = native, numpy, threads
        self._options = dict(options)
        self._keeps_prefix = bool(self._options.pop("keep_prefix", False))
        if backend := self._options.pop("backend", None):
            _load_backend(native, backend)
        settings = native.llama_model_default_params()
        fields = {field[0] for field in settings._fields_}
        for name in fields & self._options.keys():
            setattr(settings, name, self._options.pop(name))
        self._kept: list[int] = []
        self._quiet = native.llama_log_callback(lambda level, text, data: None)
        native.llama_log_set(self._quiet, None)
        native.llama_backend_init()
        begin = time.perf_counter()
        self._model = native.llama_model_load_from_file(model.encode(), settings)
        self.weights_s = time.perf_counter() - begin
        if not self._model:
            raise RuntimeError(f"llama.cpp could not load {model}")
        self._vocab_size = native.llama_vocab_n_tokens(native.llama_model_get_vocab(self._model))
        self._context: Any = None
        self._room = (0, 0)
        self._make_batch()

    def prepare(self, prompts: Sequence[list[int]], output_lens: Sequence[int]) -> None:
        """Create a context for the number and lengths of requests, unless the current one fits."""
        longest = max(len(p) + n for p, n in zip(prompts, output_lens, strict=True))
        room = (len(prompts), -(-longest // CONTEXT_GRANULE) * CONTEXT_GRANULE)
        if room == self._room or (self._keeps_prefix and room <= self._room):
            return
        if self._context is not None:
            self._native.llama_free(self._context)
        self._context = self._create_context(*room)
        if not self._context:
            raise RuntimeError(
                f"llama.cpp cannot create a context for {room[0]} requests of {room[1]} tokens"
            )
        self._room, self._kept = room, []
        # Touch the buffers of a new context, as they are in a running server.
        self.generate([[1] * min(MAX_MICRO_BATCH, longest - 2)], [2])

    def generate(
        self, prompts: Sequence[list[int]], output_lens: Sequence[int]
    ) -> list[Sequence[int]]:
        """Run steps until every request has its tokens. Sampling is greedy.

        With the option keep_prefix, a repeated prompt keeps its cache, except for the last token.
        """
        repeated = self._keeps_prefix and list(prompts) == [self._kept]
        num_kept = len(self._kept) - 1 if repeated else 0
        self._shorten_cache(num_kept)
        self._kept = list(prompts[0]) if self._keeps_prefix and len(prompts) == 1 else []
        streams = [
            Stream(row=row, prompt=prompt, num_wanted=length)
            for row, (prompt, length) in enumerate(zip(prompts, output_lens, strict=True))
        ]
        streams[0].num_done = num_kept
        waiting, running = list(streams), list[Stream]()
        while waiting or running:
            self._step(waiting, running)
        return [stream.tokens for stream in streams]

    def versions(self) -> dict[str, str]:
        """Return the versions of the binding, and the instruction sets of its library."""
        system = self._native.llama_print_system_info().decode().strip(" |")
        return {"llama-cpp-python": version("llama-cpp-python"), "llama.cpp for": system[:300]}

    def _create_context(self, num_streams: int, stream_size: int) -> Any:
        """Return a context for this number of requests of `stream_size` tokens; None on failure."""
        params = self._native.llama_context_default_params()
        params.n_seq_max, params.n_ctx = num_streams, num_streams * stream_size
        params.n_batch, params.n_ubatch = MAX_BATCH_TOKENS, MAX_MICRO_BATCH
        params.n_threads = params.n_threads_batch = self._threads
        params.kv_unified, params.no_perf = False, True
        for name, value in self._options.items():
            setattr(params, name, value)
        return self._native.llama_init_from_model(self._model, params)

    def _shorten_cache(self, num_kept: int) -> None:
        """Remove all tokens from the cache, except for the first `num_kept` of stream 0."""
        memory = self._native.llama_get_memory(self._context)
        if num_kept:
            self._native.llama_memory_seq_rm(memory, 0, num_kept, -1)
        else:
            self._native.llama_memory_clear(memory, False)

    def _make_batch(self) -> None:
        """Create the batch once, with columns that numpy writes and one stream per token."""
        numpy, as_array = self._numpy, self._numpy.ctypeslib.as_array
        self._batch = batch = self._native.llama_batch_init(MAX_BATCH_TOKENS, 0, 1)
        size = (MAX_BATCH_TOKENS,)
        self._tokens, self._positions = as_array(batch.token, size), as_array(batch.pos, size)
        self._samples = as_array(batch.logits, size)
        as_array(batch.n_seq_id, size)[:] = 1
        self._rows = numpy.zeros(MAX_BATCH_TOKENS, numpy.int32)
        kind = ctypes.POINTER(ctypes.c_int32)
        for index in range(MAX_BATCH_TOKENS):
            address = self._rows.ctypes.data + index * self._rows.itemsize
            batch.seq_id[index] = ctypes.cast(address, kind)

    def _step(self, waiting: list[Stream], running: list[Stream]) -> None:
        sampling = []
        num_tokens = 0
        for stream in running:
            position = len(stream.prompt) + len(stream.tokens) - 1
            self._put(num_tokens, stream.tokens[-1:], position, stream.row)
            sampling.append((stream, num_tokens))
            num_tokens += 1
        while waiting and num_tokens < MAX_BATCH_TOKENS:
            stream = waiting[0]
            end = stream.num_done + MAX_BATCH_TOKENS - num_tokens
            piece = stream.prompt[stream.num_done : end]
            self._put(num_tokens, piece, stream.num_done, stream.row)
            num_tokens += len(piece)
            stream.num_done += len(piece)
            if stream.num_done == len(stream.prompt):
                sampling.append((stream, num_tokens - 1))
                running.append(waiting.pop(0))
        self._samples[:num_tokens] = 0
        self._samples[[index for _, index in sampling]] = 1
        code = self._decode(num_tokens)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")
        for stream, index in sampling:
            self._take(stream, index, running)

    def _decode(self, num_tokens: int) -> int:
        """Run the model on the batch's first `num_tokens` entries. Return llama.cpp's code."""
        self._batch.n_tokens = num_tokens
        code: int = self._native.llama_decode(self._context, self._batch)
        return code

    def _put(self, index: int, tokens: list[int], position: int, row: int) -> None:
        where = slice(index, index + len(tokens))
        self._tokens[where] = tokens
        self._positions[where] = range(position, position + len(tokens))
        self._rows[where] = row

    def _take(self, stream: Stream, index: int, running: list[Stream]) -> None:
        logits = self._native.llama_get_logits_ith(self._context, index)
        row_V = self._numpy.ctypeslib.as_array(logits, (self._vocab_size,))
        stream.tokens.append(int(row_V.argmax()))
        if len(stream.tokens) == stream.num_wanted:
            running.remove(stream)


def _load_backend(native: Any, path: str) -> None:
    """Load a backend's library. Raises RuntimeError if llama.cpp or this processor rejects it."""
    load = native._lib.ggml_backend_load  # in a dependency of llama.cpp's library
    load.argtypes, load.restype = [ctypes.c_char_p], ctypes.c_void_p
    if not load(path.encode()):
        raise RuntimeError(f"llama.cpp cannot load the backend {path}")


if __name__ == "__main__":
    serve_engine(LlamaCppEngine())
