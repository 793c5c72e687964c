"""The demo model of Dovetail: where its weights lie, and the tasks that it can do.

Contract: the weights are package data, so `--model demo` needs no download. The two functions give
folders in Hugging Face form (config.json, model.safetensors, tokenizer.json). Importing this
package loads nothing. Refuses to know how a model is run.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["draft_dir", "model_dir"]


def model_dir() -> Path:
    """Give the folder of the demo model (Llama, bfloat16, at most 6 million parameters)."""
    return Path(__file__).parent / "model"


def draft_dir() -> Path:
    """Give the folder of the draft model: same tokenizer, at most 1 million parameters."""
    return Path(__file__).parent / "draft"
