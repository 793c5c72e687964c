"""Write a checkpoint as GGUF files of several types, with llama.cpp's own quantizer.

PEER_PYTHON -m quality.convert_llamacpp MODEL_DIR OUT_DIR BF16 Q8_0 Q4_K_M …
"""

from __future__ import annotations

import sys
from pathlib import Path

import llama_cpp.llama_cpp as native
from peers.convert_llamacpp import quantise, write_gguf


def main() -> None:
    """Convert the checkpoint that the command line names."""
    model, out, kinds = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    plain = out / "BF16.gguf"
    write_gguf(model, plain)
    for kind in kinds:
        if kind != "BF16":
            file_type = getattr(native, f"LLAMA_FTYPE_MOSTLY_{kind}")
            quantise(plain, out / f"{kind}.gguf", file_type)


if __name__ == "__main__":
    main()
