"""docs/architectures.md names the architectures of the plugins and of the parity tests."""

from __future__ import annotations

from docs.model_table import outdated, unproven

ADVICE = "run `python tests/docs/record_models.py`"


def test_the_tables_of_architectures_are_current():
    assert outdated() == [], ADVICE


def test_every_native_architecture_is_compared_with_transformers():
    assert unproven() == []
