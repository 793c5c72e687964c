"""Write a checkpoint as a GGUF file of one type, with llama.cpp's own quantizer.

    PEER_PYTHON -m quality.convert_llamacpp MODEL_DIR OUT_DIR TYPE

writes OUT_DIR/TYPE.gguf, and OUT_DIR/BF16.gguf if it does not exist.

    PEER_PYTHON -m quality.convert_llamacpp --float32 FILE.gguf OUT.gguf

dequantizes a GGUF file.
"""

from __future__ import annotations

import sys
from pathlib import Path

import llama_cpp.llama_cpp as native
from peers.convert_llamacpp import quantize, write_gguf


def main() -> None:
    """Convert the checkpoint or the file given on the command line."""
    if sys.argv[1] == "--float32":
        quantize(Path(sys.argv[2]), Path(sys.argv[3]), native.LLAMA_FTYPE_ALL_F32)
        return
    model, out, kind = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    plain = out / "BF16.gguf"
    if not plain.exists():
        write_gguf(model, plain)
    if kind != "BF16":
        file_type = getattr(native, f"LLAMA_FTYPE_MOSTLY_{kind}")
        quantize(plain, out / f"{kind}.gguf", file_type)


if __name__ == "__main__":
    main()
