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


def test_the_recorded_signatures_include_all_called_functions():
    assert set(WANTED) == {"version", *FOUND}


@pytest.mark.parametrize("name", FOUND)
def test_the_installed_signature_equals_the_recorded_signature(name):
    diff = difflib.unified_diff(
        WANTED[name], FOUND[name], f"{name} in {WANTED['version'][0]}", "installed", lineterm=""
    )
    text = "\n".join(diff)
    assert not text, f"read the changes, then run signatures.py:\n{text}"
