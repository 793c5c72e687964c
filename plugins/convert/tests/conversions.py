"""Writes model directories with arbitrary tensors, and converts them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dovetail_convert.convert_options import ConvertOptions
from dovetail_convert.run import run

demo = pytest.importorskip("dovetail_demo_model")

UNUSUAL = {
    "model.embed_tokens.weight": torch.randn(40, 8).bfloat16(),
    "model.norm.weight": torch.randn(8),
    'model.layers.0.self_attn.weird ñ "name" {}.weight': torch.randn(3, 5, 2).half(),
    "scalar": torch.tensor(1.25),
    "empty": torch.zeros(0, 4),
    "position_ids": torch.arange(7),
    "mask": torch.tensor([True, False, True]),
    "special": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
    "transposed": torch.randn(6, 4).T.contiguous(),
    "double": torch.randn(3, dtype=torch.float64),
    "eighth": torch.randn(9).to(torch.float8_e4m3fn),
}


def convert(model, out, **options):
    return run(str(model), ConvertOptions(out=out, **options), print)


def make_model(folder, tensors=UNUSUAL, **fields):
    """Write a directory with arbitrary tensors, which may not match its architecture."""
    folder.mkdir(exist_ok=True)
    config = json.loads((Path(demo.model_dir()) / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config | fields), "utf-8")
    save_file(dict(tensors), folder / "model.safetensors")
    return folder


def load_all(folder):
    return {
        name: value
        for file in sorted(folder.glob("*.safetensors"))
        for name, value in load_file(file).items()
    }


def same_bits(first, second):
    assert first.dtype == second.dtype and first.shape == second.shape
    return first.reshape(-1).view(torch.uint8).tolist() == (
        second.reshape(-1).view(torch.uint8).tolist()
    )
