"""The sample of texts for reviewers contains every kind of text."""

from __future__ import annotations

import pytest

from architecture import sources
from architecture.texts import SAMPLED_KINDS, all_texts, markdown_texts, python_texts, sample_texts

PYTHON = '''"""A module."""

LIMIT = 4  # Four, as
"""An attribute."""

def test_it_works():
    """Work."""
    raise ValueError(f"the value {LIMIT} is too "
        "large for this")
'''
MARKDOWN = """# A heading of a page

One sentence that
wraps. Another sentence follows.

    code that is not read

| first cell here | second cell has words |
"""


def test_a_text_of_a_python_file_has_a_kind_and_a_line_number():
    by_name = {
        (python_text.kind, python_text.line, python_text.text)
        for python_text in python_texts("a.py", PYTHON, shipped=True)
    }
    assert by_name == {
        ("docstring", 1, "A module."),
        ("comment", 3, "Four, as"),
        ("docstring", 4, "An attribute."),
        ("test name", 6, "test_it_works"),
        ("docstring", 7, "Work."),
        ("message", 8, "the value {…} is too large for this"),
    }


def test_strings_of_code_that_is_not_shipped_are_not_messages():
    kinds = {python_text.kind for python_text in python_texts("a.py", PYTHON, shipped=False)}
    assert kinds == {"docstring", "comment", "test name"}


def test_documents_are_split_into_sentences():
    assert [
        (markdown_text.line, markdown_text.text)
        for markdown_text in markdown_texts("a.md", MARKDOWN)
    ] == [
        (1, "A heading of a page"),
        (3, "One sentence that wraps."),
        (3, "Another sentence follows."),
        (8, "first cell here"),
        (8, "second cell has words"),
    ]


@pytest.mark.costly
def test_a_sample_has_equal_parts_and_depends_only_on_the_seed(monkeypatch):
    some_files = sources.written_files()[::8]
    monkeypatch.setattr(sources, "written_files", lambda: some_files)
    texts = list(all_texts())
    sample = sample_texts(texts, 200, seed=1)
    assert [item.kind for item in sample] == [kind for kind in SAMPLED_KINDS for _ in range(50)]
    assert sample == sample_texts(texts, 200, seed=1) != sample_texts(texts, 200, seed=2)
