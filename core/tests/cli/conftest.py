"""A model without a tensor library that generates a given text letter by letter."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

EOS = 257
VOCAB_SIZE = 259

Spell = Callable[..., list[str]]


@pytest.fixture
def spell(tmp_path: Path) -> Spell:
    """Return a function that returns the options of an engine that generates a given text.

    The model maps the byte " " to the first byte of `text`, each byte of `text` to the next byte,
    and every other byte to EOS; so the bytes of `text` must differ. After the last byte the model
    generates EOS, or " " if `loop` is true.
    """

    def make(text: str = "abc", *, loop: bool = False, length: int = 4096) -> list[str]:
        table = np.zeros((VOCAB_SIZE, VOCAB_SIZE), np.float32)
        table[:, EOS] = 1.0
        path = [ord(" "), *text.encode(), ord(" ") if loop else EOS]
        for before, after in pairwise(path):
            table[before, after] = 50.0
        folder = tmp_path / "speller"
        folder.mkdir()
        np.save(folder / "bigram.npy", table)
        config = {
            "architectures": ["Bigram"],
            "vocab_size": VOCAB_SIZE,
            "max_position_embeddings": length,
            "eos_token_id": EOS,
        }
        (folder / "config.json").write_text(json.dumps(config))
        parts = {
            "--model": str(folder),
            "--platform": "bigram_dovetail:BigramPlatform",
            "--worker-cls": "bigram_dovetail:BigramWorker",
            "--tokenizer-mode": "dovetail_devkit.fakes.tokenizer:ByteTokenizer",
        }
        return [word for pair in parts.items() for word in pair]

    return make
