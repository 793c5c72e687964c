"""Quantizes and dequantizes matrices with llama.cpp, for types that `gguf` cannot write.

    PEER_PYTHON -m quality.quantize_dequantize IN.npz OUT.npz TYPE FALLBACK

IN.npz has float32 matrices. OUT.npz has the same matrices after rounding, in float32. A matrix
whose rows cannot be divided into blocks is rounded to FALLBACK, as llama.cpp does.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import llama_cpp
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize


def main() -> None:
    """Quantize and dequantize the matrices given on the command line."""
    kinds = [GGMLQuantizationType[name] for name in sys.argv[3:5]]
    with np.load(sys.argv[1]) as weights:
        rounded = {name: _rounded(weights[name], kinds) for name in weights.files}
    np.savez(sys.argv[2], **rounded)


def _rounded(weight_OI: np.ndarray, kinds: list[GGMLQuantizationType]) -> np.ndarray:
    rows, size = weight_OI.shape
    kind = next(item for item in kinds if size % GGML_QUANT_SIZES[item][0] == 0)
    block, num_bytes = GGML_QUANT_SIZES[kind]
    source = np.ascontiguousarray(weight_OI, dtype=np.float32)
    blocks_OB = np.zeros((rows, size // block * num_bytes), np.uint8)
    call = ctypes.CDLL(str(_library())).ggml_quantize_chunk
    call.restype = ctypes.c_size_t
    call.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3]
    call.argtypes += [ctypes.c_void_p]
    written = call(int(kind), source.ctypes.data, blocks_OB.ctypes.data, 0, rows, size, None)
    if written != blocks_OB.nbytes:
        raise RuntimeError(f"llama.cpp wrote {written} of {blocks_OB.nbytes} bytes")
    return dequantize(blocks_OB, kind)


def _library() -> Path:
    folder = Path(llama_cpp.__file__).parent / "lib"
    return next(path for path in sorted(folder.iterdir()) if path.name.startswith("libggml-base"))


if __name__ == "__main__":
    main()
