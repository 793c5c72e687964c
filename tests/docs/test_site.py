"""The hooks and the checker of the documentation site. `make docs` builds the site itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs" / "site"))

import check  # noqa: E402

INDEX = "search/search_index.json"


def site(folder: Path, pages: dict[str, str], indexed: list[str]) -> Path:
    for name, text in pages.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, "utf-8")
    (folder / INDEX).parent.mkdir(exist_ok=True)
    entries = [{"location": location} for location in indexed]
    (folder / INDEX).write_text(json.dumps({"docs": entries}), "utf-8")
    return folder


def test_a_site_without_external_resources_has_no_problems(tmp_path):
    page = '<link rel="canonical" href="https://x.test/"><img src="a.png"><a href="https://x.test">'
    folder = site(tmp_path, {"a.html": page, "404.html": ""}, ["a.html#part"])
    assert check.problems(folder) == []


@pytest.mark.parametrize(
    "element",
    [
        '<script src="https://x.test/a.js"></script>',
        '<link rel="stylesheet" href="//x.test/a.css">',
        '<img src="http://x.test/a.png">',
        '<iframe src="https://x.test/"></iframe>',
    ],
)
def test_an_element_that_loads_from_another_host_is_reported(element, tmp_path):
    (sentence,) = check.problems(site(tmp_path, {"a.html": element}, ["a.html"]))
    assert sentence.startswith("a.html loads ") and "x.test" in sentence


@pytest.mark.parametrize("rule", ['@import "https://x.test/a.css";', "a{b:url(//x.test/a.png)}"])
def test_a_style_sheet_that_loads_from_another_host_is_reported(rule, tmp_path):
    (sentence,) = check.problems(site(tmp_path, {"a.html": "", "b.css": rule}, ["a.html"]))
    assert sentence.startswith("b.css loads ")


def test_a_page_that_is_missing_from_the_search_index_is_reported(tmp_path):
    folder = site(tmp_path, {"a.html": "", "b/c.html": ""}, ["a.html"])
    assert check.problems(folder) == ["b/c.html is not in the search index"]


def test_an_empty_site_is_reported(tmp_path):
    assert check.problems(site(tmp_path, {}, [])) == [f"{tmp_path} contains no page"]


def test_links_point_to_pages_of_the_site():
    hooks = pytest.importorskip("hooks")
    text = "[a](../core/CONTRACTS.md#part) [b](cpu.md) [c](../README.md) [d](https://x.test)\n"
    assert hooks.with_site_links("docs/gpu.md", text) == (
        "[a](repository/core/CONTRACTS.md#part) [b](cpu.md) [c](index.md) [d](https://x.test)\n"
    )


def test_links_in_code_blocks_are_not_changed():
    hooks = pytest.importorskip("hooks")
    text = "```\n[a](../README.md)\n```\n[a](../README.md)\n"
    assert hooks.with_site_links("docs/gpu.md", text) == (
        "```\n[a](../README.md)\n```\n[a](index.md)\n"
    )


def test_a_linked_source_file_becomes_a_page():
    hooks = pytest.importorskip("hooks")
    page = hooks.code_page("examples/offline.py")
    assert page.startswith("# examples/offline.py\n\n~~~~~~python\n") and "LLM(" in page
    assert "- `offline.py`" in hooks.code_page("examples")


def test_the_reference_contains_every_public_name_and_contract():
    hooks = pytest.importorskip("hooks")
    pages = dict(hooks.reference_pages())
    assert "::: dovetail.llm.LLM" in pages["dovetail.md"] or ".LLM" in pages["dovetail.md"]
    assert {"interfaces/worker.md", "interfaces/attention.md", "errors.md"} <= set(pages)
