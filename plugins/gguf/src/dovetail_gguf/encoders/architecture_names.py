"""The names of the architectures of encoders in GGUF files."""

from __future__ import annotations

BERT, MODERN_BERT, NOMIC_BERT = "bert", "modern-bert", "nomic-bert"
ENCODER_NAMES = (BERT, MODERN_BERT, NOMIC_BERT)
"""Values of `general.architecture`."""
