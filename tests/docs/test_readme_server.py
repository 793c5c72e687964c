"""The README shows what a server returns to curl and to the client of OpenAI."""

from __future__ import annotations

import pytest
from assets.fetching import fetch
from docs.record_server import record, recorded

pytestmark = pytest.mark.slow


def test_the_readme_shows_the_responses_of_the_server():
    pytest.importorskip("openai")
    (file,) = fetch("smollm2").glob("*.gguf")
    assert recorded() == record(str(file)), "run `python tests/docs/record_server.py`"
