"""Write a W8A8 copy of a checkpoint for vLLM: int8 weights by channel, activations by token.

    PEER_PYTHON bench/peers/convert_w8a8.py MODEL_DIR OUT_DIR

The format is compressed-tensors, symmetric with rounding to nearest; embedding and LM head are
unchanged. The script needs torch and safetensors.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

_OF_BOTH = {"num_bits": 8, "type": "int", "symmetric": True, "group_size": None}
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**_OF_BOTH, "strategy": "channel", "dynamic": False},
            "input_activations": {**_OF_BOTH, "strategy": "token", "dynamic": True},
        }
    },
}


def quantize(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of the copy: each projection as int8 [out, in] and scales [out, 1]."""
    copy = {}
    for name, tensor in weights.items():
        if not name.endswith("_proj.weight"):
            copy[name] = tensor
            continue
        scale_N1 = (tensor.float().abs().amax(1, keepdim=True) / 127).clamp_min(1e-8)
        copy[name] = (tensor.float() / scale_N1).round().to(torch.int8)
        copy[f"{name}_scale"] = scale_N1.to(torch.bfloat16)
    return copy


def main() -> int:
    """Convert the checkpoint given on the command line."""
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    model, out = Path(sys.argv[1]), Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    for path in model.glob("*.json"):
        shutil.copy(path, out / path.name)
    for path in model.glob("*.safetensors"):
        save_file(quantize(load_file(path)), out / path.name, {"format": "pt"})
    config = json.loads((model / "config.json").read_text("utf-8"))
    config["quantization_config"] = QUANTIZATION
    (out / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
