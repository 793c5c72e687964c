"""Functions that damage a model directory in common ways. Each function gets the directory."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

Damage = Callable[[Path], object]
WEIGHTS = "model.safetensors"


def intact(folder: Path) -> None:
    """Do nothing, for cases with an invalid option and a valid directory."""


def config_fields(**fields: object) -> Damage:
    """Overwrite fields of config.json."""

    def damage(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return damage


def content(name: str, new: str | bytes) -> Damage:
    """Replace the content of the file `name`."""
    data = new.encode() if isinstance(new, str) else new
    return lambda folder: (folder / name).write_bytes(data)


def pipe(name: str) -> Damage:
    """Replace a file by a named pipe: opening it blocks forever."""

    def damage(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return damage


def renamed(name: str, new: str) -> Damage:
    """Rename a file."""
    return lambda folder: (folder / name).rename(folder / new)


def flipped_bit(offset: int, bit: int = 1) -> Damage:
    """Flip one bit of the weights file."""

    def damage(folder: Path) -> None:
        data = bytearray((folder / WEIGHTS).read_bytes())
        data[offset] ^= 1 << bit
        (folder / WEIGHTS).write_bytes(data)

    return damage


def header_entry(weight: str, **fields: object) -> Damage:
    """Change the header entry of one weight in the weights file."""

    def damage(folder: Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        (length,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + length])
        header[weight] |= fields
        text = json.dumps(header).encode()
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])

    return damage


def changed_weight(weight: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    """Replace one weight by the result of `change`."""

    def damage(folder: Path) -> None:
        weights = load_file(folder / WEIGHTS)
        weights[weight] = change(weights[weight])
        save_file(weights, folder / WEIGHTS)

    return damage


def fewer_ids(count: int) -> Damage:
    """Make the vocabulary of the model `count` ids smaller than the tokenizer's."""

    def damage(folder: Path) -> None:
        weights = load_file(folder / WEIGHTS)
        vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"] - count
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            weights[name] = weights[name][:vocab_size].clone()
        save_file(weights, folder / WEIGHTS)
        config_fields(vocab_size=vocab_size)(folder)

    return damage
