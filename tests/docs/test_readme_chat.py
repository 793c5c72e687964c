"""The README shows the output of `dovetail chat`, and the first token appears quickly."""

from __future__ import annotations

import pytest
from assets.fetching import fetch
from docs.record_chat import measure, page_text, record, recorded

pytestmark = pytest.mark.slow
MAX_IMPORTS = 4
"""Limit of the time to the first token, as a multiple of the time to import torch."""


@pytest.fixture(scope="module")
def smollm2():
    (file,) = fetch("smollm2").glob("*.gguf")
    return str(file)


def test_the_readme_shows_the_conversation_that_chat_prints(smollm2):
    assert recorded() == page_text(record(smollm2)), "run `python tests/docs/record_chat.py`"


@pytest.mark.clock
def test_the_first_token_appears_soon_after_the_import_of_torch(smollm2):
    measure(smollm2)  # packs the weights
    first, imported = measure(smollm2)
    assert first < MAX_IMPORTS * imported, f"{first:.1f} s, import of torch {imported:.1f} s"
