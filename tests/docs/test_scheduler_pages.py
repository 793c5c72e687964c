"""The recorded properties of policies are up to date, and the tutorial's example runs."""

from __future__ import annotations

import importlib
import inspect
import re
import sys

import pytest
from docs.pages import Page
from docs.policy_facts import PAGES, TABLE, read_facts, recorded, render_table

FACTS = [pytest.param(info, id=info.name) for info in read_facts()]

OWN = PAGES / "write_your_own.md"
ADVICE = "run `python tests/docs/record_schedulers.py`"


@pytest.mark.costly
def test_the_table_of_schedulers_is_up_to_date():
    info = read_facts()
    assert recorded(TABLE.read_text("utf-8"), "policies") == render_table(info), ADVICE
    assert {path.stem for path in PAGES.glob("*.md")} == {info.name for info in info} | {OWN.stem}


@pytest.mark.parametrize("first", FACTS)
def test_the_page_of_a_scheduler_is_up_to_date(first):
    text = first.page.read_text("utf-8")
    assert recorded(text, "facts") == first.render(), ADVICE
    shown = re.findall(r"`(\w+)` \(`(.*?)`\)", text)
    assert tuple(shown) == first.options
    assert set(re.findall(r"arXiv:\d+\.\d+", text)) <= set(
        re.findall(r"arXiv:\d+\.\d+", first.docstring)
    )
    for part in ("**Source.**", "**Options.**", "**When not to use it.**"):
        assert part in text


@pytest.mark.parametrize("first", FACTS)
def test_a_policy_has_few_code_lines_and_a_mutant_for_each_guarantee(first):
    research = "research" in first.source.parts
    assert first.num_lines <= (100 if research else 40)
    assert first.guarantees
    if research:
        assert all(first.guarantees.values()), "each guarantee needs a mutant that breaks it"


@pytest.mark.costly
def test_the_example_of_the_scheduler_tutorial_runs(tmp_path, monkeypatch):
    plugin, tests = Page(path=OWN).blocks("python")
    (tmp_path / "keep_one_slot.py").write_text(plugin, "utf-8")
    (tmp_path / "keep_one_slot_tests.py").write_text(tests, "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        module = importlib.import_module("keep_one_slot_tests")
        actual = [test for name, test in vars(module).items() if name.startswith("test_")]
        assert len(actual) == 2
        for test in actual:
            assert not inspect.signature(test).parameters
            test()
    finally:
        for name in ("keep_one_slot", "keep_one_slot_tests"):
            sys.modules.pop(name, None)
