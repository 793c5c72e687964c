"""Names and texts in weight files: errors are short, and can be printed on a terminal."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from dovetail.errors import WeightError
from dovetail.interfaces.weight_loader import WeightLoaderContext
from dovetail_torch.weights import SafetensorsLoader

CLEAR_SCREEN = "\x1b[2J"


def write(folder: Path, names: list[str], dtype: str = "F32", file: str = "model") -> None:
    """Write a file with an empty tensor for each name."""
    entry = {"dtype": dtype, "shape": [0], "data_offsets": [0, 0]}
    text = json.dumps(dict.fromkeys(names, entry)).encode()
    content = struct.pack("<Q", len(text)) + text
    (folder / f"{file}.safetensors").write_bytes(content)


def load(folder: Path) -> str:
    """Load into a model with one weight. Return the error, which must be short and printable."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(2), requires_grad=False)
    with pytest.raises(WeightError) as rejection:
        SafetensorsLoader(WeightLoaderContext(model_dir=folder)).load(model)
    message = str(rejection.value)
    assert len(message) < 1000 and message.isprintable()
    return message


@pytest.mark.parametrize("name", ["x" * 501, f"{CLEAR_SCREEN}x", "a\nb", "a\x00b", "\u202egpj.exe"])
def test_a_weight_with_a_long_or_unprintable_name_is_rejected(name: str, tmp_path: Path) -> None:
    write(tmp_path, ["weight", name])
    assert "names must have at most 500 characters, all printable" in load(tmp_path)


def test_a_dtype_with_a_long_and_unprintable_name_is_rejected(tmp_path: Path) -> None:
    write(tmp_path, ["weight"], CLEAR_SCREEN + "F" * 1_000_000)
    assert "cannot be read" in load(tmp_path)


@pytest.mark.parametrize("name", ["x" * 100_000, f"{CLEAR_SCREEN}x"])
def test_a_name_of_the_index_that_its_file_does_not_contain_is_shortened(
    name: str, tmp_path: Path
) -> None:
    write(tmp_path, ["weight"], file="part")
    index = {"weight_map": {name: "part.safetensors", "weight": "part.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "which does not contain it" in load(tmp_path)


@pytest.mark.costly
def test_the_suggestion_for_a_missing_weight_is_found_in_limited_time(tmp_path: Path) -> None:
    write(tmp_path, [f"weight{number}" for number in range(50_000)])
    begin = time.process_time()
    assert "missing 1 weight (weight)" in load(tmp_path)
    assert time.process_time() - begin < 10
