"""The recorded facts about policies are current, and the tutorial's example runs."""

from __future__ import annotations

import importlib
import inspect
import re
import sys

import pytest
from docs.pages import Page
from docs.policy_facts import PAGES, TABLE, read_facts, recorded, render_table

FACTS = [pytest.param(fact, id=fact.name) for fact in read_facts()]

OWN = PAGES / "write_your_own.md"
ADVICE = "run `python tests/docs/record_schedulers.py`"


def test_the_table_of_schedulers_is_current():
    facts = read_facts()
    assert recorded(TABLE.read_text("utf-8"), "policies") == render_table(facts), ADVICE
    assert {path.stem for path in PAGES.glob("*.md")} == {fact.name for fact in facts} | {OWN.stem}


@pytest.mark.parametrize("one", FACTS)
def test_the_page_of_a_scheduler_is_current(one):
    text = one.page.read_text("utf-8")
    assert recorded(text, "facts") == one.render(), ADVICE
    shown = re.findall(r"`(\w+)` \(`(.*?)`\)", text)
    assert tuple(shown) == one.options
    assert set(re.findall(r"arXiv:\d+\.\d+", text)) <= set(
        re.findall(r"arXiv:\d+\.\d+", one.docstring)
    )
    for part in ("**Source.**", "**Options.**", "**When not to use it.**"):
        assert part in text


@pytest.mark.parametrize("one", FACTS)
def test_a_policy_is_short_and_each_guarantee_has_a_mutant(one):
    research = "research" in one.source.parts
    assert one.num_lines <= (100 if research else 40)
    assert one.guarantees
    if research:
        assert all(one.guarantees.values()), "each guarantee needs a mutant that breaks it"


def test_the_example_of_the_scheduler_tutorial_runs(tmp_path, monkeypatch):
    plugin, tests = Page(path=OWN).blocks("python")
    (tmp_path / "keep_a_seat.py").write_text(plugin, "utf-8")
    (tmp_path / "keep_a_seat_tests.py").write_text(tests, "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        module = importlib.import_module("keep_a_seat_tests")
        found = [test for name, test in vars(module).items() if name.startswith("test_")]
        assert len(found) == 2
        for test in found:
            assert not inspect.signature(test).parameters
            test()
    finally:
        for name in ("keep_a_seat", "keep_a_seat_tests"):
            sys.modules.pop(name, None)
