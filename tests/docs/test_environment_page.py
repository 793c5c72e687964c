"""The lists in docs/environment.md are up to date and complete."""

from __future__ import annotations

import pytest
from docs.record_environment import recorded, tables, variables

RENEW = "run `python tests/docs/record_environment.py`"


def test_the_environment_page_lists_every_variable_and_logging_option():
    assert recorded() == tables(), RENEW


@pytest.mark.costly
@pytest.mark.parametrize("name", variables())
def test_every_environment_variable_has_a_description(name):
    assert len(variables()[name]) > 10, f"write a text below the constant of {name}"
