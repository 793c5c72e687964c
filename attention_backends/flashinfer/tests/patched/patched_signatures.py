"""The installed FlashInfer has the signatures that this plugin was written for.

test_flashinfer_attention.py starts these tests in a separate process.
"""

from __future__ import annotations

import difflib
import json

import pytest
import signatures

WANTED = json.loads(signatures.FIXTURE.read_text("utf-8"))
FOUND = signatures.current()


def test_the_fixture_contains_all_functions():
    assert set(WANTED) == {"version", *FOUND}


@pytest.mark.parametrize("name", FOUND)
def test_the_signature_is_that_of_the_fixture(name):
    diff = difflib.unified_diff(
        WANTED[name], FOUND[name], f"{name} in {WANTED['version'][0]}", "installed", lineterm=""
    )
    text = "\n".join(diff)
    assert not text, f"read the changes, then run signatures.py:\n{text}"
