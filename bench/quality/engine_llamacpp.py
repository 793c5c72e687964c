"""llama.cpp through the C API of llama-cpp-python. One chunk per batch, a float16 KV cache.

Weights keep their own layout: the AMX layout of llama-cpp-python 0.3.36 crashes on rows of 576.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import gguf
import llama_cpp.llama_cpp as native
import numpy as np

from quality.positions import AnyRecorder


def run(job: Mapping[str, Any], recorder: AnyRecorder) -> dict[str, Any]:
    """Compute the logits of all chunks."""
    quiet = native.llama_log_callback(lambda level, text, data: None)
    native.llama_log_set(quiet, None)
    native.llama_backend_init()
    path = job["model"]
    settings = native.llama_model_default_params()
    settings.use_extra_bufts = False
    model = native.llama_model_load_from_file(path.encode(), settings)
    if not model:
        raise RuntimeError(f"llama.cpp could not load {path}")
    longest = max(len(ids) for chunks in job["chunks"].values() for ids in chunks)
    params = native.llama_context_default_params()
    params.n_ctx = params.n_batch = longest
    params.n_threads = params.n_threads_batch = job["threads"]
    context = native.llama_init_from_model(model, params)
    if not context:
        raise RuntimeError(f"llama.cpp could not create a context of {longest} tokens")
    vocab_size = native.llama_vocab_n_tokens(native.llama_model_get_vocab(model))
    for text, chunks in job["chunks"].items():
        for number, ids in enumerate(chunks):
            recorder.begin(text, number, ids)
            _decode(context, ids)
            for position in range(len(ids) - 1):
                row = native.llama_get_logits_ith(context, position)
                recorder.add(np.ctypeslib.as_array(row, (1, vocab_size)))
            recorder.end()
    native.llama_free(context)
    native.llama_model_free(model)
    return {
        "bytes_per_weight": _bytes_per_weight(path),
        "versions": {"llama-cpp-python": version("llama-cpp-python")},
    }


def _decode(context: Any, ids: Sequence[int]) -> None:
    native.llama_memory_clear(native.llama_get_memory(context), True)
    batch = native.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for position, token in enumerate(ids):
        batch.token[position], batch.pos[position] = token, position
        batch.n_seq_id[position], batch.seq_id[position][0] = 1, 0
        batch.logits[position] = 1
    code = native.llama_decode(context, batch)
    native.llama_batch_free(batch)
    if code:
        raise RuntimeError(f"llama_decode returned {code}")


def _bytes_per_weight(path: str) -> float:
    """Return the mean over matrices. The embedding counts only if it is also the LM head."""
    tensors = gguf.GGUFReader(path).tensors
    names = {tensor.name for tensor in tensors}
    skipped = "token_embd.weight" if "output.weight" in names else ""
    matrices = [item for item in tensors if len(item.shape) == 2 and item.name != skipped]
    return sum(int(matrice.n_bytes) for matrice in matrices) / sum(
        int(matrice.n_elements) for matrice in matrices
    )
