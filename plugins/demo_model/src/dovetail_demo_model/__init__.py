"""The demo models of Dovetail: the directories of their weights, and their data.

Contract: the weights are package data, so `--model demo` needs no download. The functions
return directories in Hugging Face format (config.json, model.safetensors, tokenizer.json).
Importing this package loads no weights. The package does not depend on an engine.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["draft_dir", "embedding_dir", "model_dir"]


def model_dir() -> Path:
    """Return the directory of the demo model (Llama, bfloat16, at most 6 million parameters)."""
    return Path(__file__).parent / "model"


def draft_dir() -> Path:
    """Return the directory of the draft model: same tokenizer, at most 1 million parameters."""
    return Path(__file__).parent / "draft"


def embedding_dir() -> Path:
    """Return the directory of the embedding model (BERT, float32, with its own tokenizer)."""
    return Path(__file__).parent / "embedding"
