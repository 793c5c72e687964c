"""architectures.md and models.md name the architectures of plugins and parity tests."""

from __future__ import annotations

from docs.model_table import outdated, unproven
from docs.models_page import PAGE, replaced

ADVICE = "run `python tests/docs/record_models.py`"


def test_the_tables_of_architectures_are_up_to_date():
    assert outdated() == [], ADVICE


def test_the_table_of_tested_variants_is_up_to_date():
    text = PAGE.read_text("utf-8")
    assert replaced(text) == text, ADVICE


def test_every_native_architecture_is_compared_with_transformers():
    assert unproven() == []
