"""Compares the table of architectures in docs/models.md with the cases of the parity tests."""

from __future__ import annotations

from docs.models_page import PAGE, replaced


def test_the_page_lists_the_tested_architectures():
    page = PAGE.read_text("utf-8")
    assert page == replaced(page), "run python tests/docs/record_models.py"
